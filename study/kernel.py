"""What only the Linux kernel can do or tell: end a process with its parent, cap its memory, say whom it killed."""

import contextlib
import ctypes
import resource
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel send this process a SIGTERM when its parent dies, by whatever: nothing outlives its launcher."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def cap_private_memory(more_bytes: int) -> None:
    """Refuse this process any private memory beyond what it has now and this much more. A refusal kills nobody."""
    status = Path("/proc/self/status").read_text().splitlines()
    now_kib = next(int(line.split()[1]) for line in status if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (now_kib * 1024 + more_bytes, resource.RLIM_INFINITY))


def private_memory_is_capped() -> bool:
    return resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory, on this machine, since it started."""
    with contextlib.suppress(OSError):  # some sandboxes have no such file, and tell of no kills
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
