"""What only the Linux kernel can do or tell: end a process with its parent, and say whom it killed for memory."""

import ctypes
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel send this process a SIGTERM when its parent dies, by whatever: nothing outlives its launcher."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory, on this machine, since it started."""
    for line in Path("/proc/vmstat").read_text().splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0
