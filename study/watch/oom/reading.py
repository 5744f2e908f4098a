"""Read an error about memory out of a text or a log: what was asked for, and what was allocated, reserved and free."""

import functools
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from study.core import files
from study.core.errors import Stop

FILE = Path(__file__).with_name("messages.toml")
MAX_BYTES = 20 * 2**20  # of a log
LONGEST_LINE = 300  # characters that are shown
MESSAGE = 1500  # characters after its first word in which a message ends: PyTorch's have 700
ABOVE = 6000  # characters of traceback above it
HEAD = 2**18  # characters at the beginning of a log, where configs are
CALL = 1500  # characters in which the call that failed is
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
SIZE = r"(\d{1,15}(?:\.\d{1,3})?) ?(bytes|[KMGT]iB|[KMGT]B)\b"
Where = Literal["GPU", "host", "pinned", "shared memory", "disk", "killed"]

# CUDACachingAllocator.cpp asks the driver for 2 MiB, 20 MiB (for 1 to 10 MiB) or multiples of 2 MiB, and says that.
MIB = 2**20
SMALL = 2 * MIB
MIDDLE = 20 * MIB
ROUND = 2 * MIB
IMPOSSIBLE = 2**50  # bytes: an unsigned number below zero, under WSL


class Kind(BaseModel):
    """A kind of message."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    where: Where
    pattern: str


class Messages(BaseModel):
    """The content of messages.toml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: list[Kind]
    fields: dict[str, str]
    settings: dict[str, str]


@functools.cache
def messages() -> Messages:
    return Messages(**tomllib.loads(FILE.read_text().replace("SIZE", SIZE)))


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
        if self.total is None or self.free is None:
            return None
        if self.allocated is None and "on startup" not in self.line:  # there an engine has not taken any memory yet
            return None
        return self.total - self.free - (self.allocated or 0) - (self.unallocated or 0)


def content(where: str | None) -> str:
    """Return the text of a file, of the standard input (`-` or nothing), or the text itself."""
    if where is None and sys.stdin.isatty():
        raise Stop("no error is given", "paste it in quotes, name the log that holds it, or pipe the log in")
    if where is None or where == "-":
        return _standard_input()
    if not _is_path(where):
        return where
    try:
        return files.read(Path(where), MAX_BYTES).decode(errors="replace")
    except OSError as error:
        if "more than" in files.why(error):
            raise _too_long(f"{where!r:.200}") from None
        raise Stop(f"{where!r:.200} cannot be read ({files.why(error)})", "name a log, or paste the error") from None


def _standard_input() -> str:
    raw = sys.stdin.buffer.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise _too_long("the standard input")
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
    for kind in messages().kind:
        begins = [match.start() for match in re.finditer(kind.pattern, text, re.MULTILINE)]
        if kind.where == "pinned":
            begins = [begin for begin in begins if _is_pinned(text, begin)]
        if begins:
            return _error(kind.where, text, begins)
    if re.fullmatch(r"\S*[/.]\S+", text.strip()):
        raise Stop(f"there is no file {text.strip():.200}", "name a log, or give the error in quotes")
    what = "no error about memory is in this text"
    raise Stop(what, "paste the lines around `out of memory`, `Killed` or `exit code 137`")


def _is_pinned(text: str, begin: int) -> bool:
    """Return whether CUDA's error is one of pinned memory: the call above it says so."""
    return "pin" in text[max(0, begin - CALL) : begin] or text.startswith("cuda", begin)


def _error(where: Where, text: str, begins: list[int]) -> OomError:
    first = begins[0]
    begin = text.rfind("\n", 0, first) + 1
    message = " ".join(text[begin : first + MESSAGE].split())
    message = _until_next(message, message.find("llocate ") + 8)
    line = " ".join(text[begin : begin + 4 * LONGEST_LINE].splitlines()[0].split())[:LONGEST_LINE]
    context = text[max(0, begin - ABOVE) : first + MESSAGE // 3]
    processes = re.findall(rf"Process (\d{{1,10}}) has {SIZE} memory in use", message)
    listed = tuple((int(number), _bytes(value, unit)) for number, value, unit in processes)
    return OomError(where, line, context, len(begins), _request(where, message), processes=listed, **_fields(message))


def _until_next(message: str, after: int) -> str:
    """Return a message without the next one of the same kind: several ranks write into one log."""
    following = message.find("Tried to allocate", after)
    return message if following < 0 else message[:following]


def _fields(message: str) -> dict[str, int | None]:
    sizes = {name: _first(pattern, message) for name, pattern in messages().fields.items()}
    reserved = sizes.pop("reserved")
    allocated = sizes["allocated"]
    if sizes["unallocated"] is None and reserved is not None and allocated is not None:
        sizes["unallocated"] = max(0, reserved - allocated)
    return sizes


def _first(pattern: str, message: str) -> int | None:
    match = re.search(pattern, message)
    if match is None:
        return None
    value, unit = filter(None, match.groups())
    size = _bytes(value, unit)
    return None if size > IMPOSSIBLE else size


def _bytes(value: str, unit: str) -> int:
    return int(float(value) * UNITS[unit])


def _request(where: Where, message: str) -> Asked | None:
    match = re.search(rf"(?:to allocate|asking for) {SIZE}", message)
    if match is None or float(match[1]) == 0:
        return None
    text = f"{match[1]} {match[2]}"
    size = _bytes(match[1], match[2])
    digits = len(match[1].partition(".")[2])
    half = 0 if match[2] == "bytes" else UNITS[match[2]] * 10**-digits / 2
    if where != "GPU":
        return Asked(text, int(size - half), int(size + half))
    if size <= SMALL:
        return Asked(text, 1, MIB)
    if size == MIDDLE:
        return Asked(text, MIB, 10 * MIB)
    return Asked(text, int(size - half - ROUND) + 1, int(size + half))


def settings(text: str, error: OomError) -> dict[str, str]:
    """Return what the head of a log, and the lines above the error, say of the training."""
    searched = text[:HEAD] + "\n" + error.context
    values = {}
    for name, pattern in messages().settings.items():
        for match in re.finditer(pattern, searched):
            values[name] = match[1]
    return values
