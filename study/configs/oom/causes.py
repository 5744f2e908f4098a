"""Rank what can be behind an error: by its traceback, by the size that was asked for, and by the other numbers.

Each sign gives points to a cause. Of equal causes the first in causes.toml comes first.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired

from pydantic import with_config
from typing_extensions import TypedDict

from study.configs.oom.reading import OomError
from study.core.tables import NO_OTHER_KEYS, Regex, read_table

CAUSES = Path(__file__).with_name("causes.toml")
PROOF = 5  # points of numbers that leave no other cause
CLUE = 4  # of the traceback, or of a line above the message
LIKELY = 4
HINT = 2  # of numbers that other causes could have, too
MOST = 4  # causes that are shown
CONTEXT_BYTES = 2.5 * 2**30  # more than a CUDA context and NCCL take
OUTSIDE_SHARE = 0.1  # of the GPU: no more is outside PyTorch's numbers without another process
FIRST = 10  # more than a clue and a size together
MANY_TIMES = 10  # so much more is unused than was asked for: nothing else says as much
UNUSED_SHARE = 0.1  # of the GPU: PyTorch holds no more without use (allocator.FRAGMENTATION is what is usual)
EMPTY = 0.05  # of the GPU: no model is there
# Points of a tensor of the asked size. Those of the optimizer come first: their sizes follow from the model alone. Some
# weights are as wide as activations.
OF_A_SIZE = {
    "oom-optimizer": 5, "oom-frozen": 5, "oom-logits": 4, "oom-embeddings": 4, "oom-attention": 4, "oom-gather": 4,
    "oom-activations": 3, "oom-buckets": 3, "oom-weights": 3, "oom-padded": 1,
}  # fmt: skip


@with_config(NO_OTHER_KEYS)
class CauseRow(TypedDict):
    """A row of causes.toml. The keys are explained there."""

    sentence: str
    remedy: str
    apart: str
    recomputed: NotRequired[str]
    clue: NotRequired[Regex]
    last: NotRequired[int]
    elsewhere: NotRequired[Regex]


@functools.cache
def rows() -> dict[str, CauseRow]:
    return read_table(CAUSES, dict[str, CauseRow], CauseRow)


Sign = tuple[str, int, str]  # the cause, its points, and why


@dataclass(frozen=True)
class Cause:
    """A cause with its reasons. `what` is a sentence without its end."""

    id: str
    what: str
    points: int
    reasons: tuple[str, ...]
    remedy: str
    apart: str

    def remedy_for(self, checkpointing: bool | None) -> str:
        """What to do. Who recomputes activations already is not told to."""
        return rows()[self.id].get("recomputed", self.remedy) if checkpointing else self.remedy

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
    signs = _signs(error, sizes, shards_weights, states)
    if has_adapters:
        signs = [("oom-frozen-weight" if sign[0] == "oom-weights" else sign[0], *sign[1:]) for sign in signs]
        sizes = sizes | {"oom-frozen-weight": sizes.get("oom-weights", "")}
    points: Counter[str] = Counter()
    for id, more, _ in signs:
        points[id] += more
    values = {"asked": error.asked.text, "unallocated": f"{error.unallocated / 2**30:.2f} GiB", "states": states}
    ranked = [
        Cause(
            id=id,
            what=sizes.get(id, "") + text["sentence"].format(**values),
            points=points[id],
            reasons=tuple(reason for of, _, reason in signs if of == id),
            remedy=text["remedy"],
            apart=text["apart"],
        )
        for id, text in rows().items()
        if id in points
    ]
    return sorted(ranked, key=lambda cause: -cause.points)[:MOST]


def _signs(error: OomError, sizes: dict[str, str], shards_weights: bool, states: str) -> list[Sign]:
    """Return all that speaks for a cause."""
    if error.where != "GPU":  # nothing else counts
        return [(error.where, PROOF, "the message says so")]
    # The last frame does not make tensors of these: their sizes and their names are there by chance.
    others = [id for id, row in rows().items() if re.search(row.get("elsewhere", "(?!)"), error.frames[-1])]
    fitting = [(id, OF_A_SIZE[id], "the size fits") for id in sizes]
    signs = [sign for sign in (*clues(error), *_numbers(error), *fitting) if sign[0] not in others]
    # A rank holds only parts of weights, so a whole one has been gathered: this comes before `weights`.
    if "oom-weights" in sizes and shards_weights:
        signs.append(("oom-gather", LIKELY, "the size is that of a weight, of which a rank holds a part"))
    if states:
        signs.append(("oom-states", FIRST, "they are most of this GPU, or more than it has"))
    if all(points < HINT for _, points, _ in signs):
        signs.append(("oom-activations", 1, "most messages without another sign end with smaller micro-batches"))
    return signs


def clues(error: OomError) -> Iterator[Sign]:
    """Yield what the traceback names, or the lines above the error: functions, or what a log says of its phase."""
    # `last`: so many frames are searched; 0: all.
    for id, row in rows().items():
        if named := re.findall(row.get("clue", "(?!)"), "".join(error.frames[-row.get("last", 0) :])):
            yield id, CLUE, f"the text names {named[-1].strip(' (=')}"


def _numbers(error: OomError) -> Iterator[Sign]:
    """Yield what the sizes in the message show by themselves."""
    if "CUDA error: out of memory" in error.line:
        yield "oom-other-process", HINT, "the driver says it, and not PyTorch's allocator"
    if not error.asked.high or error.total is None:
        return
    least = error.asked.low
    if least > error.total:  # one tensor that no setting would make fit
        if (error.allocated or 0) <= EMPTY * error.total:
            yield "oom-capacity", PROOF, "the message says what the GPU has, and nothing else is on it"
        else:
            yield "oom-attention", HINT + 1, "it is larger than the GPU, and the square of the tokens makes such"
    free = error.free or 0
    if error.outside > max(OUTSIDE_SHARE * error.total, CONTEXT_BYTES) and free + error.outside >= least:
        unexplained = f"{error.outside / 2**30:.2f} GiB of the GPU unexplained"
        yield "oom-other-process", PROOF, f"PyTorch's numbers leave {unexplained}"
    yield from _unused(error, least, free, UNUSED_SHARE * error.total)


def _unused(error: OomError, least: int, free: int, share: float) -> Iterator[Sign]:
    """Yield what speaks for memory that is reserved in pieces that are too small."""
    unused = error.unallocated
    if unused >= max(least, share):
        points = FIRST if unused >= MANY_TIMES * least else CLUE
        yield "oom-fragmentation", points, "the unused part alone is larger than what was asked for"
    elif unused and unused + free >= error.asked.high:
        points = HINT if unused >= share else 1
        yield "oom-fragmentation", points, "the unused part and what is free would be enough together"
