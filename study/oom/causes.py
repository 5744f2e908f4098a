"""Rank what can be behind an error: by the lines above it, by the size that was asked for, and by the other numbers."""

import functools
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from study.io.numbers import size
from study.oom.reading import OomError
from study.oom.sizes import EXACT, OF_TOKENS, Match

FILE = Path(__file__).with_name("causes.toml")
CLUE = 4  # points of a line above the message
PROOF = 5  # points of numbers that leave no other cause
LIKELY = 4
MOST = 4  # causes that are shown
CONTEXT_BYTES = 1.25 * 2**30  # more than a CUDA context takes
NCCL_BYTES = 1.25 * 2**30
SMALL_SHARE = 0.3  # of a GPU on which no NCCL is
OUTSIDE_SHARE = 0.1  # of any GPU
# Shares of the GPU that PyTorch holds without use: so much is usual (memory_kinds.FRAGMENTATION), so much is not.
USUAL_SHARE = 0.05
UNUSUAL_SHARE = 0.1
EMPTY = 0.05  # of the GPU: no model is there
OF_A_SHAPE = ("optimizer", "gather", "saving", "loading")  # each may make a tensor of a weight's shape


class Description(BaseModel):
    """A cause in causes.toml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    what: str
    remedy: str
    apart: str
    clue: str | None = None
    points: int = CLUE


@dataclass(frozen=True)
class Cause:
    """A cause with its reasons. `what` is a sentence without its end."""

    id: str
    what: str
    points: int
    reasons: tuple[str, ...]
    remedy: str
    apart: str

    @property
    def is_likely(self) -> bool:
        return self.points >= LIKELY


@functools.cache
def descriptions() -> dict[str, Description]:
    return {name: Description(**fields) for name, fields in tomllib.loads(FILE.read_text()).items()}


def causes(error: OomError, found: list[Match], *, shards_weights: bool = False, states: str = "") -> list[Cause]:
    """Return the causes with the most points first. `states` says what a prediction finds at the peak."""
    points: defaultdict[str, int] = defaultdict(int)
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    shapes = {match.cause: match.factors for match in found}
    for id, count, reason in [*_clues(error), *_sizes(error, found, shards_weights), *_numbers(error)]:
        points[id] += count
        reasons[id].append(reason)
    if error.where == "GPU" and error.allocated and not any(count > 1 for count in points.values()):
        points["large" if error.asked and error.asked.low > error.allocated else "full"] += 1
    values = _values(error, states)
    ranked = sorted(points, key=lambda id: -points[id])
    return [_cause(id, points[id], reasons[id], shapes.get(id), error, values) for id in ranked[:MOST]]


def _cause(id: str, points: int, reasons: list[str], shape: str | None, error: OomError, values: dict) -> Cause:
    text = descriptions()[id]
    what = text.what.format(**values)
    if shape and error.asked:
        what = f"{error.asked.text} = {shape}: {what}"
    return Cause(id, what, points, tuple(dict.fromkeys(reasons)), text.remedy, text.apart)


def _clues(error: OomError) -> Iterator[tuple[str, int, str]]:
    """Yield what the lines above a GPU's error name. Of several, those nearest to the message count in full."""
    kinds = {"host": "host", "killed": "host", "pinned": "pinned", "shared memory": "shared_memory", "disk": "disk"}
    if error.where in kinds:
        yield kinds[error.where], PROOF, "the message says so"
        return
    last: dict[str, re.Match[str]] = {}
    for id, text in descriptions().items():
        for match in re.finditer(text.clue, error.context) if text.clue else ():
            last[id] = match
    nearest = max((match.start() for match in last.values()), default=0)
    for id, match in last.items():
        count = descriptions()[id].points
        is_far = count == CLUE and match.start() < nearest
        yield id, count - is_far, f"the text names {match[0].strip(' (=')}"


def _sizes(error: OomError, found: list[Match], shards_weights: bool) -> Iterator[tuple[str, int, str]]:
    for match in found:
        fits = match.seen or ("the size fits" if match.points >= EXACT else "the size could fit")
        yield match.cause, match.points, fits
        if match.cause == "weights":  # a clue decides which of them it is
            for id in OF_A_SHAPE:
                if re.search(descriptions()[id].clue or "$^", error.context):
                    yield id, match.points, f"the size is that of a weight: {match.factors}"
            if shards_weights:
                yield "gather", match.points + 1, "the size is that of a whole weight, of which a rank holds a part"
    if error.asked and error.total and error.asked.low > error.total and (error.allocated or 0) > EMPTY * error.total:
        for id in OF_TOKENS:
            yield id, 2, "it is larger than the GPU, and only tokens make tensors so large"


def _numbers(error: OomError) -> Iterator[tuple[str, int, str]]:
    """Yield what the sizes in the message show by themselves."""
    if error.where != "GPU" or error.asked is None or error.total is None or error.free is None:
        return
    asked = error.asked.low
    unused = error.unallocated or 0
    outside = error.outside or 0
    if asked > error.total:
        if (error.allocated or 0) <= EMPTY * error.total:
            yield "capacity", PROOF, f"the GPU has {size(error.total)}, and nothing else is on it"
        return
    with_nccl = min(CONTEXT_BYTES + NCCL_BYTES, SMALL_SHARE * error.total)
    usual = max(CONTEXT_BYTES, with_nccl, OUTSIDE_SHARE * error.total)
    if outside > usual and error.free + outside >= asked:
        yield "other_process", PROOF, "PyTorch's numbers leave so much of the GPU unexplained"
    if unused >= USUAL_SHARE * error.total and unused + error.free >= asked:
        is_proof = unused >= max(asked, UNUSUAL_SHARE * error.total)
        how = "the unused part alone is" if is_proof else "with what is free, the unused part is"
        yield "fragmentation", CLUE if is_proof else 2, f"{how} larger than what was asked for"
    elif error.free >= error.asked.segment:
        yield "refused", 2, "more is free than was asked for"


def _values(error: OomError, states: str) -> dict[str, str]:
    sizes = {name: getattr(error, name) for name in ("total", "free", "allocated", "unallocated", "outside")}
    shown = {name: "-" if value is None else size(value) for name, value in sizes.items()}
    listed = ", ".join(f"process {number}: {size(held)}" for number, held in error.processes)
    asked = error.asked.text if error.asked else "a tensor"
    host = (
        f"{asked} could not be had" if error.where == "host" else "the kernel, a container or Slurm ended the process"
    )
    processes = f" ({listed})" if listed else ""
    return shown | {"asked": asked, "host": host, "processes": processes, "states": states}
