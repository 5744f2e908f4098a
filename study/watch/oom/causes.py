"""Rank what can be behind an error: by the lines above it, by the size that was asked for, and by the other numbers."""

import functools
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from study.core.numbers import size
from study.watch.oom.reading import OomError
from study.watch.oom.sizes import EXACT, Match

FILE = Path(__file__).with_name("causes.toml")
CLUE = 4  # points of a line above the message
PROOF = 5  # points of numbers that leave no other cause
PHASE = 3  # points of what a log says last about what runs
LIKELY = 4
HINT = 2  # points of numbers that other causes could have, too
MOST = 4  # causes that are shown
CONTEXT_BYTES = 1.25 * 2**30  # more than a CUDA context takes
NCCL_BYTES = 1.25 * 2**30
SMALL_SHARE = 0.3  # of a GPU on which no NCCL is
OUTSIDE_SHARE = 0.1  # of any GPU
UNUSED_SHARE = 0.1  # of the GPU: PyTorch holds no more without use (memory_kinds.FRAGMENTATION is what is usual)
UNUSED_BYTES = 2**30
LARGE_SHARE = 0.1  # of the GPU in one tensor
EMPTY = 0.05  # of the GPU: no model is there
STATES_SHARE = 0.9  # of the GPU: no room for a pass
OF_A_SHAPE = ("optimizer", "gather", "saving", "loading")  # each may make a tensor of a weight's shape
TRAINING = r"\*+ Running training|(?i:start(?:ing)? training)"
STEPS = r"(?i:\bstep|\biter(?:ation)?|\bit)s?[ \]:=/]{1,3}(\d{1,9})|\b(\d{1,9})/\d{1,9} \["
MANY_STEPS = 10
KINDS = {"host": "host", "killed": "host", "pinned": "pinned", "shared memory": "shared_memory", "disk": "disk"}
PARTS = (1, 2, 4, 8)  # ranks among which tensor parallelism divides a vocabulary


class Description(BaseModel):
    """A cause in causes.toml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    what: str
    remedy: str
    apart: str
    clue: str = r"(?!)"  # matches nothing
    phrase: str = r"(?!)"
    points: int = CLUE


@dataclass(frozen=True)
class Evidence:
    """A reason for a cause."""

    cause: str
    points: int
    reason: str


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


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of the training besides the sizes of its tensors."""

    vocabulary: int | None = None
    shards_weights: bool = False
    states_bytes: float | None = None
    """Weights, gradients and the optimizer's states on a GPU, predicted."""


@functools.cache
def descriptions() -> dict[str, Description]:
    return {name: Description(**fields) for name, fields in tomllib.loads(FILE.read_text()).items()}


def causes(error: OomError, matches: list[Match], known: Known) -> list[Cause]:
    """Return the causes with the most points first."""
    if error.where in KINDS:
        return _ranked([Evidence(KINDS[error.where], PROOF, "the message says so")], [], error)
    evidence = [*_clues(error), *_phases(error), *_steps(error), *_vocabulary(error, known.vocabulary)]
    evidence += [*_sizes(error, matches, known.shards_weights), *_numbers(error), *_states(error, known.states_bytes)]
    if all(each.points < HINT for each in evidence):
        evidence.append(Evidence("activations", 1, "most messages without another sign are mended by smaller passes"))
    return _ranked(evidence, matches, error)


def _ranked(evidence: list[Evidence], matches: list[Match], error: OomError) -> list[Cause]:
    """Return the causes of the evidence. Of equal ones, the first in causes.toml comes first."""
    shapes = {match.cause: match.factors for match in matches}
    values = _values(error)
    ranked = []
    for id, text in descriptions().items():
        reasons = [each for each in evidence if each.cause == id]
        if not reasons:
            continue
        what = text.what.format(**values)
        if id in shapes and error.asked:
            what = f"{error.asked.text} = {shapes[id]}: {what}"
        points = sum(each.points for each in reasons)
        texts = tuple(dict.fromkeys(each.reason for each in reasons))
        ranked.append(Cause(id, what, points, texts, text.remedy, text.apart))
    return sorted(ranked, key=lambda cause: -cause.points)[:MOST]


def _clues(error: OomError) -> Iterator[Evidence]:
    """Yield what the lines above the error name. Of several, those nearest to the message count in full."""
    last = _last("clue", error.context)
    nearest = max((match.start() for match in last.values()), default=0)
    for id, match in last.items():
        points = descriptions()[id].points
        if points == CLUE and match.start() < nearest:
            points -= 1
        yield Evidence(id, points, f"the text names {match[0].strip(' (=')}")


def _last(pattern: str, text: str) -> dict[str, re.Match[str]]:
    """Return where each cause's pattern matches last."""
    last = {}
    for id, description in descriptions().items():
        for match in re.finditer(getattr(description, pattern), text):
            last[id] = match
    return last


def _phases(error: OomError) -> Iterator[Evidence]:
    """Yield what the log says last about what runs: loading, evaluation, saving. Training is no cause."""
    last = _last("phrase", error.context)
    begin = max((match.start() for match in re.finditer(TRAINING, error.context)), default=0)
    id = max(last, key=lambda id: last[id].start(), default=None)
    if id is not None and last[id].start() > begin:
        yield Evidence(id, PHASE, f"the log says {last[id][0]!r} last")


def _steps(error: OomError) -> Iterator[Evidence]:
    """Yield what it means that many steps had passed."""
    numbers = [int(match[1] or match[2]) for match in re.finditer(STEPS, error.context)]
    if not numbers or numbers[-1] < MANY_STEPS:
        return
    reason = f"{numbers[-1]:,} steps had passed"
    if error.asked and error.asked.is_small:
        yield Evidence("leak", HINT, f"{reason}, and a small tensor did not fit any more")
    else:
        yield Evidence("activations", HINT, f"{reason}, so these rows are longer, or more is kept")
        yield Evidence("leak", 1, reason)


def _vocabulary(error: OomError, vocabulary: int | None) -> Iterator[Evidence]:
    """Yield logits if the lines above the message have the vocabulary as a number, or a rank's part of it."""
    numbers = set(re.findall(r"\d{5,7}", error.context))
    for parts in PARTS:
        if vocabulary and str(vocabulary // parts) in numbers:
            yield Evidence(
                "logits", CLUE, f"the text has the number {vocabulary // parts}, 1/{parts} of the vocabulary"
            )


def _sizes(error: OomError, matches: list[Match], shards_weights: bool) -> Iterator[Evidence]:
    for match in matches:
        fits = "the size fits" if match.points >= EXACT else "the size could fit"
        yield Evidence(match.cause, match.points, match.seen or fits)
    for match in matches:
        if match.cause == "weights":
            yield from _of_a_shape(error, match, shards_weights)


def _of_a_shape(error: OomError, match: Match, shards_weights: bool) -> Iterator[Evidence]:
    """Yield what makes tensors of a weight's shape, if a clue names it."""
    named = _last("clue", error.context)
    for id in OF_A_SHAPE:
        if id in named:
            yield Evidence(id, match.points, f"the size is that of a weight: {match.factors}")
    if shards_weights:
        reason = "the size is that of a whole weight, of which a rank holds a part"
        yield Evidence("gather", match.points + 1, reason)


def _numbers(error: OomError) -> Iterator[Evidence]:
    """Yield what the sizes in the message show by themselves."""
    if error.asked is None or error.total is None:
        if "CUDA error: out of memory" in error.line:
            yield Evidence("other_process", HINT, "the driver says it, and not PyTorch's allocator")
        return
    if error.asked.low > error.total:
        yield from _impossible(error, error.total)
        return
    if error.asked.low > LARGE_SHARE * error.total:
        share = error.asked.low / error.total
        yield Evidence("activations", HINT, f"one tensor has {share:.0%} of the GPU, and mostly tokens make such")
    if error.free is not None:
        yield from _unused(error, error.asked.low, error.total, error.free)


def _impossible(error: OomError, total: int) -> Iterator[Evidence]:
    """Yield what makes a tensor that is larger than the GPU."""
    if (error.allocated or 0) <= EMPTY * total:
        yield Evidence("capacity", PROOF, f"the GPU has {size(total)}, and nothing else is on it")
        return
    reason = "it is larger than the GPU, and only tokens make tensors so large"
    yield Evidence("attention", HINT + 1, f"{reason}, most of all with the square of their number")
    yield Evidence("logits", HINT, reason)
    yield Evidence("activations", HINT, reason)


def _unused(error: OomError, requested_bytes: int, total: int, free: int) -> Iterator[Evidence]:
    """Yield what the parts of the GPU show that are free, unused, or neither PyTorch's nor free."""
    unused = error.unallocated or 0
    outside = error.outside or 0
    with_nccl = min(CONTEXT_BYTES + NCCL_BYTES, SMALL_SHARE * total)
    if outside > max(CONTEXT_BYTES, with_nccl, OUTSIDE_SHARE * total) and free + outside >= requested_bytes:
        yield Evidence("other_process", PROOF, "PyTorch's numbers leave so much of the GPU unexplained")
    if unused >= max(requested_bytes, UNUSED_SHARE * total, UNUSED_BYTES):
        yield Evidence("fragmentation", CLUE, "the unused part alone is larger than what was asked for")
    elif unused >= requested_bytes:
        yield Evidence(
            "fragmentation", 1, "the unused part is larger than what was asked for, but PyTorch often has as much"
        )
    elif error.asked and free >= error.asked.segment:
        yield Evidence("refused", HINT, "more is free than was asked for")


def _states(error: OomError, states_bytes: float | None) -> Iterator[Evidence]:
    """Yield whether weights, gradients and the optimizer's states leave room for a pass."""
    if states_bytes is None or error.total is None:
        return
    needed = f"weights, gradients and the optimizer's states need about {size(int(states_bytes))}"
    if states_bytes > STATES_SHARE * error.total:
        yield Evidence("weights", CLUE, f"{needed} of {size(error.total)}")
    elif states_bytes < error.total / 2:
        yield Evidence("activations", 1, f"{needed} of {size(error.total)}: what grows with tokens fills the rest")


def _values(error: OomError) -> dict[str, str]:
    sizes = {name: getattr(error, name) for name in ("total", "free", "allocated", "unallocated", "outside")}
    shown = {name: "-" if value is None else size(value) for name, value in sizes.items()}
    request = error.asked.text if error.asked else "a tensor"
    host = "the kernel, a container or Slurm ended the process"
    if error.where == "host":
        host = f"{request} could not be had"
    listed = ", ".join(f"process {number}: {size(process_bytes)}" for number, process_bytes in error.processes)
    return shown | {"asked": request, "host": host, "processes": f" ({listed})" if listed else ""}
