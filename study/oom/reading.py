"""Read an error about memory out of a text or a log: what was asked for, and what was allocated, reserved and free.

The messages are PyTorch's, of all its versions, for CUDA and ROCm; of its allocator for the host; of the kernel, Slurm
and launchers that saw a process killed; and of what DeepSpeed swaps to disk.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from study.errors import Stop
from study.io import files

MAX_BYTES = 20 * 2**20  # of a log
LONGEST_LINE = 300  # characters that are shown
MESSAGE = 1500  # characters after its first word in which a message ends: PyTorch's have 700
ABOVE = 6000  # characters of traceback above it
CALL = 1500  # characters in which the call that failed is
UNITS = {
    "bytes": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
}
SIZE = r"(\d{1,15}(?:\.\d{1,3})?) ?(bytes|[KMGT]iB|[KMGT]B)\b"
Where = Literal["GPU", "host", "pinned", "shared memory", "disk", "killed"]

# CUDACachingAllocator.cpp asks the driver for 2 MiB, 20 MiB (for 1 to 10 MiB) or multiples of 2 MiB, and says that.
MIB = 2**20
SMALL = 2 * MIB
MIDDLE = 20 * MIB
ROUND = 2 * MIB
IMPOSSIBLE = 2**50  # bytes: an unsigned number below zero, under WSL

# In this order: the first kind that a text has is explained. A message with sizes says more than its consequences do.
KINDS: list[tuple[Where, str]] = [
    ("GPU", rf"(?:CUDA|HIP|XPU|MPS|NPU)[^\n]{{0,40}}out of memory[^\n]{{0,20}}\s+Tried to allocate {SIZE}"),
    ("GPU", rf"(?i:\bOOM|out.?of.?memory)[^\n]{{0,100}}?(?:[Tt]ried|[Tt]rying|ask\w+) (?:to allocate|for) {SIZE}"),
    ("GPU", r"Free memory on device \([\d.]+/[\d.]+ GiB\) on startup is less than"),
    ("pinned", r"(?:CUDA|HIP) error: (?:out of memory|invalid argument)|cuda(?:HostAlloc|HostRegister|MallocHost)"),
    ("host", r"DefaultCPUAllocator|alloc_cpu\.cpp|std::bad_alloc|\bMemoryError\b|Cannot allocate memory"),
    ("shared memory", r"out of shared memory|insufficient shared memory|killed by signal: Bus error|/dev/shm"),
    ("disk", r"No space left on device|Disk quota exceeded|buffer nbytes != file bytes|Not enough buffers \d"),
    ("GPU", r"(?i:(?:CUDA|HIP)[ \w:]{0,20}out of memory)|OutOfMemoryError"),
    ("killed", r"oom[-_]kill|Out of memory: Killed process|OOMKilled|OUT_OF_MEMORY|memory cgroup out of memory"),
    ("killed", r"return code = -9|exit ?code:? ?\(?-9|exit(?:ed with)? (?:exit )?(?:code|status)[ :]+137|code: 137"),
    ("killed", r"Signal 9 \(SIGKILL\)|SIGKILL|signal: Killed|^.{0,200}\bKilled\s*$"),
]  # fmt: skip
FIELDS = {
    "total": rf"(?:total(?: capacity)? of |has total |on a ){SIZE}|{SIZE} total capacity|/([\d.]+) (GiB)\) on startup",
    "free": rf"{SIZE} (?:is )?free\b|Free memory on device \(([\d.]+)/[\d.]+ (GiB)\)|Free memory on device \(([\d.]+)/",
    "allocated": rf"{SIZE} already allocated|Of the allocated memory {SIZE}",
    "unallocated": rf"{SIZE} is reserved by PyTorch but unallocated|{SIZE} cached",
    "reserved": rf"{SIZE} reserved in total",
}


@dataclass(frozen=True)
class Asked:
    """The size in the message, and between which sizes the tensor is: the message rounds."""

    text: str
    low: int
    high: int

    @property
    def is_small(self) -> bool:
        """Return whether the tensor says nothing: the memory was full before it."""
        return self.high <= 10 * MIB

    @property
    def segment(self) -> int:
        """Return the bytes that the allocator asks the driver for."""
        if self.high <= MIB:
            return SMALL
        return MIDDLE if self.is_small else self.high


@dataclass(frozen=True)
class OomError:
    """What a message says. Sizes are in bytes; None is not said. `context` is the message with the lines above it."""

    where: Where
    line: str
    context: str
    count: int  # such messages in the text
    asked: Asked | None = None
    total: int | None = None
    free: int | None = None
    allocated: int | None = None
    unallocated: int | None = None  # reserved by PyTorch and not in use
    processes: tuple[tuple[int, int], ...] = ()  # those that the message lists, and their bytes

    @property
    def outside(self) -> int | None:
        """Return the bytes that are neither free nor PyTorch's: other processes, the CUDA context, NCCL."""
        if self.total is None or self.free is None or (self.allocated is None and not self.is_before):
            return None
        return self.total - self.free - (self.allocated or 0) - (self.unallocated or 0)

    @property
    def is_before(self) -> bool:
        """Return whether an engine looked at the memory before it took any."""
        return "on startup" in self.line


def content(where: str | None) -> str:
    """Return the text of a file, of the standard input (`-` or nothing), or the text itself."""
    if where in (None, "-"):
        if where is None and sys.stdin.isatty():
            raise Stop("no error is given", "paste it in quotes, name the log that holds it, or pipe the log in")
        raw = sys.stdin.buffer.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise _too_long("the standard input")
        return raw.decode(errors="replace")
    assert where is not None
    try:
        raw = files.read(Path(where), MAX_BYTES) if _is_path(where) else where.encode(errors="replace")
    except OSError as error:
        if "more than" in files.why(error):
            raise _too_long(f"{where!r:.200}") from None
        raise Stop(f"{where!r:.200} cannot be read ({files.why(error)})", "name a log, or paste the error") from None
    return raw.decode(errors="replace")


def _is_path(text: str) -> bool:
    try:
        return "\n" not in text and Path(text).exists()
    except (OSError, ValueError):  # too long for a path, or with a NUL in it
        return False


def _too_long(what: str) -> Stop:
    return Stop(f"{what} has more than {MAX_BYTES >> 20} MiB", "give its end: tail -c 10M train.log | study oom -")


def find(text: str) -> OomError:
    """Return the first error about memory, of the kind that says most. Raise Stop if there is none."""
    for where, pattern in KINDS:
        matches = (match for match in re.finditer(pattern, text, re.MULTILINE) if _is_of(where, text, match.start()))
        if (first := next(matches, None)) is None:
            continue
        begin = text.rfind("\n", 0, first.start()) + 1
        message = " ".join(text[begin : first.start() + MESSAGE].split())
        message = _until_next(message, message.find("llocate ") + 8)
        context = text[max(0, begin - ABOVE) : first.end() + MESSAGE // 3]
        line = " ".join(text[begin : begin + 4 * LONGEST_LINE].splitlines()[0].split())[:LONGEST_LINE]
        return OomError(where, line, context, 1 + sum(1 for _ in matches), **_sizes(where, message))
    what = "no error about memory is in this text"
    raise Stop(what, "paste the lines around `out of memory`, `Killed` or `exit code 137`")


def _is_of(where: Where, text: str, begin: int) -> bool:
    """Return whether a message is of this kind. CUDA's error for pinned memory is told by the call above it."""
    return where != "pinned" or "pin" in text[max(0, begin - CALL) : begin] or text.startswith("cuda", begin)


def _until_next(message: str, after: int) -> str:
    """Return a message without the next one of the same kind: several ranks write into one log."""
    following = message.find("Tried to allocate", after)
    return message if following < 0 else message[:following]


def _sizes(where: Where, message: str) -> dict:
    found = {name: _first(pattern, message) for name, pattern in FIELDS.items()}
    reserved = found.pop("reserved")
    allocated = found["allocated"]
    if found["unallocated"] is None and reserved is not None and allocated is not None:
        found["unallocated"] = max(0, reserved - allocated)
    processes = re.findall(rf"Process (\d{{1,10}}) has {SIZE} memory in use", message)
    listed = tuple((int(number), _bytes(value, unit)) for number, value, unit in processes)
    return {"asked": _asked(where, message), "processes": listed, **found}


def _first(pattern: str, message: str) -> int | None:
    if (match := re.search(pattern, message)) is None:
        return None
    parts = [part for part in match.groups() if part]
    size = _bytes(parts[0], parts[1] if len(parts) > 1 else "GiB")
    return None if size > IMPOSSIBLE else size


def _bytes(value: str, unit: str) -> int:
    return int(float(value) * UNITS[unit])


def _asked(where: Where, message: str) -> Asked | None:
    match = re.search(rf"(?:to allocate|asking for) {SIZE}", message)
    if match is None or float(match[1]) == 0:
        return None
    value = match[1]
    unit = match[2]
    size = _bytes(value, unit)
    digits = len(value.partition(".")[2])
    half = 0 if unit == "bytes" else UNITS[unit] * 10**-digits / 2
    if where != "GPU":
        return Asked(f"{value} {unit}", int(size - half), int(size + half))
    if size <= SMALL:
        return Asked(f"{value} {unit}", 1, MIB)
    if size == MIDDLE:
        return Asked(f"{value} {unit}", MIB, 10 * MIB)
    return Asked(f"{value} {unit}", int(size - half - ROUND) + 1, int(size + half))
