"""Services of the Linux kernel: end a process with its parent, cap its memory, count kills for lack of memory."""

import ctypes
import os
import resource
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1
MORE_MEMORY = "give fewer ranks, a smaller model, or a machine with more memory"  # what a user can do after a kill


def text(path: str) -> str:
    """The content of a file of the kernel; empty if it does not exist or may not be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def fields(path: str) -> dict[str, str]:
    """The lines `name: value` of a file of the kernel."""
    parts = (line.partition(":") for line in text(path).splitlines())
    return {name.strip(): value.strip() for name, _, value in parts}


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def die_with_parent(parent: int | None = None) -> None:
    """Make the kernel send this process a SIGTERM when its parent dies, so that nothing outlives its launcher.

    The kernel does not report a parent that died before this call. So the parent is compared with the process id that
    the caller gives. Without one, only a death during this call is noticed.
    """
    parent = parent or os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def cap_private_memory(more_bytes: int) -> None:
    """Limit this process to its present private memory plus so many bytes. Beyond that allocations fail."""
    now_kib = int(fields("/proc/self/status")["VmData"].split()[0])
    resource.setrlimit(resource.RLIMIT_DATA, (now_kib * 1024 + more_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def lift_memory_cap() -> None:
    """Remove all limits on memory that may be removed: a process that is ending has to record why."""
    for limit in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        most = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (most, most))


def private_memory_is_capped() -> bool:
    return resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot, which clock corrections do not change. None: no process."""
    after_name = text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(after_name[19]) if after_name else None


def is_alive(pid: int) -> bool:
    """Whether a process runs. A process that has ended is a zombie until its parent waits for it."""
    after_name = text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return bool(after_name) and after_name[0] not in "ZX"


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped a process (SIGSTOP, or a debugger)."""
    return text(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1] in (["T"], ["t"])


def oom_kills() -> int | None:
    """The number of processes that the kernel has killed for lack of memory so far. None if unknown.

    The count is the machine's. In a sandbox without that file, it is that of this process's control group.
    """
    files = ["/proc/vmstat"]
    for line in text("/proc/self/cgroup").splitlines():
        _, kind, group = line.split(":", 2)
        if kind == "":  # version 2
            files.append(f"/sys/fs/cgroup{group}/memory.events")
        elif kind == "memory":  # version 1
            files.append(f"/sys/fs/cgroup/memory{group}/memory.oom_control")
    for file in files:
        counts = dict(line.split() for line in text(file).splitlines())
        if "oom_kill" in counts:
            return int(counts["oom_kill"])
    return None
