"""Services of the Linux kernel: end a process with its parent, cap its memory, count kills for lack of memory."""

import contextlib
import ctypes
import os
import re
import resource
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
KERNEL_LOG = Path("/dev/kmsg")
FIRST_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO: here process ids are those of the kernel's log
VICTIM = re.compile(rb"(?:Out of memory|Memory cgroup out of memory)[^\n]*?: Killed process (\d+)\b")
LONGEST_RECORD = 8192  # a read of the log gives one record, and the kernel cuts it here
MORE_MEMORY = "give fewer ranks, a smaller model, or a machine with more memory"  # what a user can do after a kill


def text(path: str) -> str:
    """Return the content of a file of the kernel; empty if it does not exist or may not be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def fields(path: str) -> dict[str, str]:
    """Return the lines `name: value` of a file of the kernel."""
    parts = (line.partition(":") for line in text(path).splitlines())
    return {name.strip(): value.strip() for name, _, value in parts}


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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


def _state(pid: int) -> list[str]:
    """Return the fields of a process after its name; empty if there is no such process."""
    return text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot, which clock corrections do not change."""
    return int(_state(pid)[19]) if _state(pid) else None


def is_alive(pid: int) -> bool:
    """Return whether a process runs. A process that has ended is a zombie until its parent waits for it."""
    return _state(pid)[:1] not in ([], ["Z"], ["X"])


def is_stopped(pid: int) -> bool:
    """Return whether somebody has stopped a process (SIGSTOP, or a debugger)."""
    return _state(pid)[:1] in (["T"], ["t"])


def oom_kills() -> int | None:
    """Return the number of processes that the kernel has killed for lack of memory so far. None if unknown.

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


@dataclass(frozen=True)
class OomKills:
    """What the kernel killed for lack of memory during a launch: the number on this machine, and the ids if known."""

    count: int | None = None
    pids: frozenset[int] = frozenset()


class OomKillCounter:
    """Counts the processes that the kernel kills for memory from now on. Most containers and users cannot read ids."""

    def __init__(self, log: Path = KERNEL_LOG) -> None:
        self._before = oom_kills()
        self._log: int | None = None
        with contextlib.suppress(OSError):
            if str(Path("/proc/self/ns/pid").readlink()) == FIRST_NAMESPACE:
                self._log = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.lseek(self._log, 0, os.SEEK_END)

    def so_far(self) -> OomKills:
        pids = frozenset(map(int, VICTIM.findall(self._new_records())))
        now = oom_kills()
        if now is None or self._before is None:
            return OomKills(len(pids) or None, pids)
        return OomKills(now - self._before, pids)

    def _new_records(self) -> bytes:
        records = b""
        with contextlib.suppress(OSError):  # also when there is no more
            while self._log is not None:
                with contextlib.suppress(BrokenPipeError):  # some were overwritten before they were read
                    record = os.read(self._log, LONGEST_RECORD)
                    records += record
                    if not record:
                        break
        return records

    def close(self) -> None:
        if self._log is not None:
            os.close(self._log)
