"""Reads from the kernel's log which processes it killed for lack of memory. Most containers and users may not."""

import contextlib
import os
import re
from pathlib import Path

LOG = Path("/dev/kmsg")
FIRST_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO: here process ids are those of the log
VICTIM = re.compile(r"(?:Out of memory|Memory cgroup out of memory)[^\n]*?: Killed process (\d+)\b")
LONGEST_RECORD = 8192  # a read gives one record, and the kernel cuts it here


class KernelLog:
    """The kernel's log from now on."""

    def __init__(self, path: Path = LOG):
        self._file = None
        with contextlib.suppress(OSError):
            if str(Path("/proc/self/ns/pid").readlink()) == FIRST_NAMESPACE:
                self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.lseek(self._file, 0, os.SEEK_END)

    def killed_for_memory(self) -> set[int] | None:
        """The ids of the processes that were killed for memory since then. None if the log cannot be read."""
        if self._file is None:
            return None
        text = b""
        try:
            while record := self._next():
                text += record
        except OSError:  # also when there is no more
            pass
        return {int(victim) for victim in VICTIM.findall(text.decode(errors="replace"))}

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _next(self) -> bytes:
        """The next record. Some may have been overwritten before they were read."""
        while self._file is not None:
            with contextlib.suppress(BrokenPipeError):
                return os.read(self._file, LONGEST_RECORD)
        return b""
