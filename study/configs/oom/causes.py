"""Rank what can be behind an error: by its traceback, by the size that was asked for, and by the other numbers.

Each reason gives points to a cause. Of equal causes the first in causes.toml comes first.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Literal, NotRequired

from pydantic import with_config
from typing_extensions import TypedDict

from study.configs.oom.reading import CONTEXT_BYTES, OomError
from study.core.tables import NO_OTHER_KEYS, Regex, read_table
from study.core.text import binary_size

CAUSES = Path(__file__).with_name("causes.toml")
PROOF = 5  # points of numbers that leave no other cause
CLUE = 4  # of the traceback, or of a line above the message
LIKELY = 4
SIZE_FITS = "the size fits"
HINT = 2  # of numbers that other causes could have, too
MOST = 4  # causes that are shown
OUTSIDE_SHARE = 0.1  # of the GPU: no more is outside PyTorch's numbers without another process
FIRST = 10  # more than a clue and a size together
MANY_TIMES = 10  # so much more is unused than was asked for: nothing else says as much
UNUSED_SHARE = 0.1  # of the GPU: PyTorch holds no more without use (allocator.FRAGMENTATION is what is usual)
FAR_BELOW = 0.7  # of the GPU: what is allocated and what is asked for together would fit without pieces
EMPTY = 0.05  # of the GPU: no model is there
MOMENTS = re.compile(r"""\[["']exp_avg(?:_sq)?["']\] ?=""")
# The last frame is autograd's own: no layer has begun its backward pass, or is computed again.
BACKWARD_BEGINS = re.compile(r"\brun_backward\(")
BACKWARD = re.compile("backward")
CARETS = re.compile(r"(?:\[\w+\]:)?\s*([~^]+)\s*")  # as Python 3.11 and later print them below a line
LONGEST_MARKED = 60  # characters
RECOMPUTING = re.compile(r"\bcheckpoint\.py\b")
BEFORE_UPDATES = re.compile("initialize_optimizer_states|_setup_for_real_optimizer")
# Causes that fill memory between the steps of a training, which may fit.
BETWEEN_STEPS = {
    "oom-evaluation": "evaluation",
    "oom-saving": "saving",
    "oom-loading": "loading",
    "oom-generation": "generation",
}
# Those, and others, that a traceback names where no activation is held.
OUTSIDE_PASSES = {*BETWEEN_STEPS, "oom-optimizer", "oom-weights", "oom-frozen-weight"}
WIDTHS = (4, 2)  # bytes that an element of a tensor has, where its row does not say it


@with_config(NO_OTHER_KEYS)
class CauseRow(TypedDict):
    """A row of causes.toml. The keys are explained there."""

    sentence: str
    remedy: str
    apart: str
    part_of: NotRequired[list[Literal["activations", "logits", "optimizer", "gradients", "weights"]]]
    points: NotRequired[int]
    widths: NotRequired[list[int | float]]
    clue: NotRequired[Regex]
    first_update: NotRequired[str]
    last: NotRequired[int]
    elsewhere: NotRequired[Regex]


@functools.cache
def rows() -> dict[str, CauseRow]:
    return read_table(CAUSES, dict[str, CauseRow], CauseRow)


@dataclass(frozen=True)
class Reason:
    """What speaks for a cause."""

    cause: str
    points: int
    text: str


@dataclass(frozen=True)
class Cause:
    """A cause with its reasons. `what` is a sentence without its end. remedies.py fits `remedy`, the table's."""

    id: str
    what: str
    points: int
    reasons: tuple[str, ...]
    remedy: str
    apart: str

    @property
    def part_of(self) -> list[str]:
        """The parts of memory that it is of; a change that shrinks none of them is no advice."""
        return [*rows()[self.id].get("part_of", ())]

    @property
    def is_likely(self) -> bool:
        """Whether one strong sign, or two weak ones, speak for it."""
        return self.points >= LIKELY


def causes(
    error: OomError, sizes: dict[str, str], shards_weights: bool, states: str, has_adapters: bool = False
) -> list[Cause]:
    """Return the causes with the most points first. `sizes` are tensors of the asked size, as a sentence begins.

    `states` says what the model states take, if they nearly fill the GPU. With adapters a whole weight is frozen.
    """
    # How good it is: once the rules were written anew, 14 of 20 threads were named; before, 15 of 22, 7 of 16 and 5 of
    # 16. Who says "host memory" for such a message, and else "too many tokens", names 12 of the 20 (reports/log.md).
    reasons = _reasons(error, sizes, shards_weights, states)
    if has_adapters:
        reasons = [replace(each, cause=each.cause.replace("oom-weights", "oom-frozen-weight")) for each in reasons]
    values = {"asked": error.asked.text, "unallocated": f"{error.unallocated / 2**30:.2f} GiB", "states": states}
    ranked = []
    for id, row in rows().items():
        of_cause = [reason for reason in reasons if reason.cause == id]
        if not of_cause:
            continue
        sentence = row["first_update"] if "first_update" in row and makes_moments(error) else row["sentence"]
        what = sizes.get(id, "") + sentence.format(**values)
        points = sum(reason.points for reason in of_cause)
        ranked.append(Cause(id, what, points, tuple(reason.text for reason in of_cause), row["remedy"], row["apart"]))
    return sorted(ranked, key=lambda cause: -cause.points)[:MOST]


def _reasons(error: OomError, sizes: dict[str, str], shards_weights: bool, states: str) -> list[Reason]:
    """Return all that speaks for a cause."""
    if error.where != "GPU":  # nothing else counts
        host = f", and {error.full_host}" if error.where == "oom-host" and error.full_host else ""
        return [Reason(error.where, PROOF, f"the message says so{host}")]
    reasons = [*clues(error), *_numbers(error)]
    is_of_step = in_a_step(error)
    most_points = _most_of_size(sizes) if is_of_step else LIKELY - 1  # what is loaded or saved has the size of states
    reasons += [Reason(cause, min(rows()[cause]["points"], most_points), SIZE_FITS) for cause in sizes]
    # A rank holds only parts of weights, so a whole one has been gathered in a step: this comes before `weights`.
    if shards_weights and is_of_step and not {"oom-weights", "oom-frozen-weight"}.isdisjoint(sizes):
        reasons.append(
            Reason("oom-gather", min(most_points, LIKELY), "the size is that of a weight, of which a rank holds a part")
        )
    # The last frame does not make tensors of these: their sizes and their names are there by chance.
    reasons = [each for each in reasons if not re.search(rows()[each.cause].get("elsewhere", "(?!)"), error.frames[-1])]
    if states:
        reasons.append(Reason("oom-states", FIRST, "they are most of this GPU, or more than it has"))
    if max((reason.points for reason in reasons), default=0) < HINT:
        usual = "most messages without another sign end with smaller micro-batches"
        reasons.append(Reason("oom-activations", 1, usual))
    return reasons


def _most_of_size(sizes: dict[str, str]) -> int:
    """Return the points that a size gives a cause at most: beside a guess nothing is sure.

    Nor is it where tokens and something else have the size, or two causes of equal points. Widths and lengths are
    powers of two.
    """
    if "oom-padded" in sizes:
        return rows()["oom-padded"]["points"]
    has_tokens = any({"activations", "logits"} & {*rows()[cause].get("part_of", ())} for cause in sizes)
    points = [rows()[cause]["points"] for cause in sizes]
    is_open = (has_tokens and len(sizes) > 1) or points.count(max(points, default=0)) > 1
    return LIKELY - 1 if is_open else PROOF


@functools.lru_cache(maxsize=1)  # one answer asks ten times
def clues(error: OomError) -> tuple[Reason, ...]:
    """Return what the traceback names, or the lines above the error: functions, or what a log says of its phase."""
    found = []
    # `last`: so many frames are searched; 0: all.
    for id, row in rows().items():
        text = "".join(error.frames[-row.get("last", 0) :])
        if named := [*re.finditer(row.get("clue", "(?!)"), text)]:
            found.append(Reason(id, CLUE, f"the text names {_marked(named[-1], error.context)}"))
    return tuple(found)


def _marked(clue: re.Match[str], context: str) -> str:
    """Return what a traceback's carets mark in the line of a clue: the line may name more. Without carets the clue."""
    frames, end = clue.string, clue.end(clue.re.groups)
    line, *_ = frames[frames.rfind("\n", 0, end) + 1 :].split("\n", 1)
    marks, *_ = context.rpartition(f"{line}\n")[2].split("\n", 1)  # which frames are without
    if marked := CARETS.fullmatch(marks):
        return f"`{shorten(line[slice(*marked.span(1))], LONGEST_MARKED, placeholder=' ...')}`"
    return " ".join(clue[clue.re.groups].replace('"', "").split()).strip(" (=")


def hinted_causes(error: OomError) -> list[str]:
    """Return the causes that the traceback names."""
    return [clue.cause for clue in clues(error)]


def backward_begins(error: OomError) -> bool:
    """Whether the traceback ends where the backward pass begins, and no layer is computed again."""
    return bool(BACKWARD_BEGINS.search(error.frames[-1])) and not RECOMPUTING.search(error.traceback)


def in_a_step(error: OomError) -> bool:
    """Whether the traceback names nothing that is done between the steps of a training."""
    return BETWEEN_STEPS.keys().isdisjoint(hinted_causes(error))


def in_evaluation(error: OomError) -> bool:
    """Whether the traceback, or the log, names an evaluation: it keeps no activations that recomputing would spare."""
    return "oom-evaluation" in hinted_causes(error)


def in_a_pass(error: OomError) -> bool:
    """Whether the traceback names nothing that is done while no activations are held."""
    return OUTSIDE_PASSES.isdisjoint(hinted_causes(error))


def in_a_layers_forward(error: OomError) -> bool:
    """Whether the traceback ends in a layer's MLP in the forward pass, which nothing computes again."""
    is_of_layer = error.frames != [error.context] and "oom-activations" in hinted_causes(error)
    return is_of_layer and not any(each.search(error.traceback) for each in (BACKWARD, RECOMPUTING))


def makes_moments(error: OomError) -> bool:
    """Whether the last frame makes Adam's moments in an update, the first: stage 3 makes them before any."""
    return bool(MOMENTS.search(error.frames[-1])) and not BEFORE_UPDATES.search(error.traceback)


def _numbers(error: OomError) -> Iterator[Reason]:
    """Yield what the sizes in the message show by themselves."""
    if "CUDA error: out of memory" in error.line:
        yield Reason("oom-other-process", HINT, "the driver says it, and not PyTorch's allocator")
    if engine := error.beside_engine.engine:
        private, allocated = (binary_size(each, 4) for each in (engine, error.allocated or 0))
        yield Reason("oom-private-pool", PROOF, f"{private} of {allocated} allocated are in private pools")
    if error.asked.high and error.total is not None:
        yield from _too_large(error, error.total)
        yield from _outside(error, error.total)
        yield from _unused(error, error.total)


def _too_large(error: OomError, total: int) -> Iterator[Reason]:
    """Yield what makes one tensor that no setting would make fit."""
    if error.asked.low <= total:
        return
    if (error.allocated or 0) <= EMPTY * total:
        yield Reason("oom-capacity", PROOF, "the message says what the GPU has, and nothing else is on it")
    else:
        reason = "it is larger than the GPU, and the square of the tokens makes such"
        yield Reason("oom-attention", HINT + 1, reason)


def others_hold_a_part(error: OomError, total: int) -> bool:
    """Whether more is outside PyTorch's numbers than a CUDA context and NCCL take."""
    return error.outside > max(OUTSIDE_SHARE * total, CONTEXT_BYTES)


def _outside(error: OomError, total: int) -> Iterator[Reason]:
    """Yield what speaks for memory that PyTorch does not hold, and that would be enough."""
    if others_hold_a_part(error, total) and (error.free or 0) + error.outside >= error.asked.low:
        said = [f"the message says that {error.told_others}"] if error.others else []
        if not said or error.unexplained > CONTEXT_BYTES:
            said.append(f"PyTorch's numbers leave {error.unexplained / 2**30:.2f} GiB of the GPU unexplained")
        yield Reason("oom-other-process", PROOF, ", and ".join(said))


def _unused(error: OomError, total: int) -> Iterator[Reason]:
    """Yield what speaks for memory that is reserved in pieces that are too small."""
    unused, least, share = error.unallocated, error.asked.low, UNUSED_SHARE * total
    if unused >= max(least, share):
        points, reason = CLUE, "the unused part alone is larger than what was asked for"
        if unused >= MANY_TIMES * least:
            points = FIRST
        if error.allocated and error.needed <= FAR_BELOW * total:
            points, reason = FIRST, f"{error.sum_of_tensors} of {binary_size(total, 4)}, and {reason}"
        yield Reason("oom-fragmentation", points, reason)
    elif unused and unused + (error.free or 0) >= error.asked.high:
        points = HINT if unused >= share else 1
        yield Reason("oom-fragmentation", points, "the unused part and what is free would be enough together")
