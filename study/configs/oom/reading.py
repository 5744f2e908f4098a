"""Read an error about memory out of a text or a log: what was asked for, and what was allocated, reserved and free."""

import functools
import itertools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from study.configs import exit_codes
from study.core.errors import Stop
from study.core.files import from_toml
from study.core.text import binary_size

LONGEST_LINE = 600  # characters that are shown: PyTorch's message up to what is reserved but unallocated
LONGEST_QUOTE = 200  # characters of it in an answer
MESSAGE = 1500  # characters after its first word in which a message ends: PyTorch's have 700
ABOVE = 6000  # characters of traceback above it
BETWEEN_TEXTS = "\n\n\f\n"  # where one file ends, and another begins: no line above an error is of another file
NEAR = 1500  # characters of the last frame of a traceback with the message, and of what a scheduler says above a kill
MOST = 1000  # messages of one kind that are looked at
# Where it begins, or a frame of it, as Python, IPython and Rich print them.
FRAME = r'(?=Traceback \(most recent|\bFile (?:"[^"\n]*", line |[~/][^\n]*:\d+, in )|\u2771)'
# GB are GiB, too: PyTorch's allocator for MPS writes them so (18.13 GB is 1.7 of two thirds of 16 GiB).
UNITS = {f"{prefix}{end}": 2 ** (10 * power) for power, prefix in enumerate("KMGT", 1) for end in ("iB", "B")}
UNITS["bytes"] = 1
SIZE = r"(\d{1,15}(?:\.\d{1,3})?) ?(bytes|[KMGT]iB|[KMGT]B)\b"
# As DeepSpeed prints it (runtime/utils.py, see_memory_usage).
HOST_FULL = re.compile(r"CPU Virtual Memory:\s+used = [\d.]+ GB, percent = ([\d.]+)%")
NEARLY_FULL = 80  # percent of the host's memory: a choice
IMPOSSIBLE = 2**50  # bytes: an unsigned number below zero, under WSL

PRIVATE_SHARE = 0.5  # of what is allocated: a training's own CUDA graphs take less beside its states
CONTEXT_BYTES = 2.5 * 2**30  # more than a CUDA context and NCCL take

# CUDACachingAllocator.cpp asks the driver for 2 MiB, 20 MiB (for 1 to 10 MiB) or multiples of 2 MiB, and says that.
MIB = 2**20
SMALL = 10 * MIB
ROUND = 2 * MIB
SEGMENTS = {ROUND: (1, MIB), 20 * MIB: (MIB, SMALL)}


@functools.cache
def messages() -> dict[str, Any]:
    """Return the patterns of messages, and of the sizes in them."""
    table = from_toml(Path(__file__).with_name("messages.toml").read_text(encoding="utf-8").replace("SIZE", SIZE))
    for kind in table["kind"]:
        kind["pattern"] = exit_codes.filled(kind["pattern"])
    return table


@dataclass(frozen=True)
class Asked:
    """The size in the message, and between which sizes the tensor is: the message rounds."""

    text: str
    low: int
    high: int

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def fits(self, size_bytes: float) -> bool:
        """Whether it may be a tensor of this size. Small ones say nothing: the memory was full before them."""
        return self.high > SMALL and self.low <= size_bytes <= self.high


@dataclass(frozen=True)
class OomError:
    """What a message says. Sizes are in bytes; None is not said. `context` is the message with the lines above it."""

    where: str  # GPU, or the cause: host, pinned, shared_memory, disk and others of messages.toml
    line: str
    context: str
    asked: Asked
    total: int | None
    free: int | None
    allocated: int | None
    private: int | None  # of what is allocated, in pools of CUDA graphs or of an inference engine
    unallocated: int  # reserved by PyTorch and not in use, as far as the message says
    others: tuple[tuple[str, int], ...]  # other processes on this GPU, with what they have
    engine: int | None = None  # of an inference engine in this process, which the other sizes are without

    @property
    def quoted(self) -> str:
        """The message up to the sentence with the size that was asked for, or any size; without one its beginning."""
        sentence = re.match(rf"(?:.*?to allocate {SIZE}|.*?{SIZE}).*?(?:\.(?= |$)|(?= \(GPU)|$)", self.line)
        return textwrap.shorten(sentence[0] if sentence else self.line, LONGEST_QUOTE, placeholder=" ...")

    @property
    def full_host(self) -> str:
        """The last line above the message that says how full the host was. Empty: none does, or it had room."""
        last = [*HOST_FULL.finditer(self.context)][-1:]
        return "".join(f"`{' '.join(each[0].split())}` above it" for each in last if float(each[1]) >= NEARLY_FULL)

    @property
    def needed(self) -> int:
        """Bytes of PyTorch's tensors with the one that was asked for."""
        return (self.allocated or 0) + self.asked.low

    @property
    def sum_of_tensors(self) -> str:
        """That sum, in words."""
        parts = f"{binary_size(self.allocated or 0, 4)} allocated + {self.asked.text} asked for"
        return f"{parts} = {binary_size(self.needed)}"

    @property
    def had(self) -> str:
        """That sum, in a sentence that goes on."""
        parts = f"{binary_size(self.allocated or 0, 4)} in use and {self.asked.text} asked for"
        return f"The log has {parts}, {binary_size(self.needed)}"

    @property
    def outside(self) -> int:
        """Bytes that are neither free nor PyTorch's: other processes, the CUDA context, NCCL. 0 if that is not said."""
        if self.total is None or self.free is None or self.allocated is None:
            return 0
        return self.total - self.free - self.allocated - self.unallocated

    @property
    def beside_engine(self) -> "OomError":
        """The error without what an inference engine in this process holds: most is in private pools then."""
        if not (self.private and self.allocated and self.private >= PRIVATE_SHARE * self.allocated):
            return self
        total = self.total - self.private if self.total else None
        return replace(self, total=total, allocated=self.allocated - self.private, private=None, engine=self.private)

    @property
    def unexplained(self) -> int:
        """Bytes outside PyTorch that the message gives to no other process."""
        return max(0, self.outside - sum(has for _, has in self.others))

    @property
    def told_others(self) -> str:
        """What other processes have, in words. Empty: the message names none."""
        return " and ".join(f"process {id} has {binary_size(has)}" for id, has in self.others)

    @functools.cached_property
    def frames(self) -> list[str]:
        """The frames of the error's traceback, the last with the message. Without one the whole context, as one."""
        _, *frames = re.split(FRAME, re.sub(messages()["no_frame"], r"\1", self.context))
        return frames if frames and len(frames[-1]) < NEAR else [self.context]

    @property
    def traceback(self) -> str:
        return "".join(self.frames)


def find(text: str) -> OomError:
    """Return the first error about memory, of the kind that says most. Raise Stop if there is none.

    One that ends a traceback comes before one that does not, and a whole message before its first half.
    """
    text = _by_rank(re.sub(messages()["color"], "", f"{text}\n"))
    for kind in messages()["kind"]:
        errors = [*_of_kind(kind, text)]
        if errors:  # one without a traceback may have been caught, and the pass tried again; a title says half of it
            return max(errors, key=lambda error: (error.frames != [error.context], error.allocated is not None))
    raise Stop(
        f"no error about memory is in {' '.join(text.split())[:60]!r}",
        "name a log, or paste the lines around `out of memory`, `Killed` or `exit code 137`; if ranks got a SIGTERM, "
        "look at the rank that died first",
    )


def _by_rank(text: str) -> str:
    """Return a log into which ranks wrote line by line, the lines of each together with those that name no rank."""
    return "".join(sorted(re.split(messages()["ranked"], text), key=re.compile(messages()["rank"]).findall))


def _of_kind(kind: dict[str, str], text: str) -> Iterator[OomError]:
    # A process that the kernel killed says nothing itself. DeepSpeed's launcher then prints `return code = -9`
    # (launcher/launch.py:259), and torchrun `Signal 9 (SIGKILL)` (torch/distributed/elastic/multiprocessing/errors).
    after = re.compile(kind.get("after", "(?!)"))
    for match in itertools.islice(re.finditer(kind["pattern"], text, re.MULTILINE), MOST):
        first = match.start()
        if after.search(text, first - NEAR, first):
            continue
        error = _error(kind["where"], text, first)
        if re.search(kind.get("above", ""), error.traceback):
            yield error


def _error(where: str, text: str, first: int) -> OomError:
    # --- the message, from the beginning of its line, on one line
    begin = text.rfind("\n", 0, first) + 1
    # It ends where the next rank's begins, or at an empty line: another text may follow.
    rest = re.split(f"{FRAME}|{messages()['ranked']}|\n\s*\n", text[first : first + MESSAGE])[0]
    message = " ".join((text[begin:first] + rest).split())
    message = "Tried to allocate".join(message.split("Tried to allocate")[:2])
    # --- what it says
    sizes = {name: _size(pattern, message) for name, pattern in messages()["fields"].items()}
    reserved = sizes.pop("reserved") or 0  # as older releases of PyTorch say it
    unallocated = sizes.pop("unallocated")
    if unallocated is None:
        unallocated = max(0, reserved - (sizes["allocated"] or 0))
    if allowed := sizes.pop("allowed"):  # less than the GPU has: the rest of it is not for this process
        sizes |= {"total": allowed, "free": max(0, allowed - (sizes["allocated"] or 0) - unallocated)}
    return OomError(
        where=where,
        line=textwrap.shorten(message, LONGEST_LINE, placeholder=" ..."),
        context=text[max(0, begin - ABOVE) : first].rpartition(BETWEEN_TEXTS)[2] + rest[: MESSAGE // 3],
        asked=_asked(where, message),
        unallocated=unallocated,
        others=tuple(_others(message, (sizes["allocated"] or 0) + unallocated)),
        **sizes,
    )


def _others(message: str, held_bytes: int) -> Iterator[tuple[str, int]]:
    """Yield the other processes that a message names. `held_bytes` are PyTorch's in this one."""
    # In a container the driver's number of this process is not its own, so PyTorch writes it as another's.
    is_own_open = re.search(messages()["own"], message) is None
    for id, number, unit in re.findall(messages()["other"], message):
        has = int(float(number) * UNITS[unit])
        if is_own_open and held_bytes and held_bytes <= has <= held_bytes + CONTEXT_BYTES:
            is_own_open = False
        else:
            yield id, has


def _size(pattern: str, message: str) -> int | None:
    match = re.search(pattern, message)
    if match is None:
        return None
    value, unit = filter(None, match.groups())
    size = int(float(value) * UNITS[unit])
    return None if size > IMPOSSIBLE else size


def _asked(where: str, message: str) -> Asked:
    match = re.search(rf"(?:to allocate|asking for) {SIZE}", message)
    if match is None or float(match[1]) == 0:
        return Asked("a tensor", 0, 0)
    number, unit = match.groups()
    text = f"{number} {unit}"
    size = float(number) * UNITS[unit]
    # Up to 1 MiB tensors share blocks of 2 MiB; from 1 to 10 MiB they share segments of 20 MiB, unless the setting
    # `large_segment_size_mb` is another (c10/core/AllocatorConfig.h:18 to 25, and 340).
    if where == "GPU" and size in SEGMENTS:
        return Asked(text, *SEGMENTS[size])
    # The message has two digits after the point: the tensor may be half of the last one smaller or larger.
    half = UNITS[unit] * 10 ** -len(number.partition(".")[2]) / 2
    rounded = ROUND if where == "GPU" else 0
    return Asked(text, int(size - half - rounded) + 1, int(size + half))
