"""Rank what can be behind an error: by the lines above it, by the size that was asked for, and by the other numbers.

Each sign gives points to a cause. Of equal causes the first in causes.toml comes first.
"""

import functools
import itertools
import math
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from study.core.text import size
from study.watch.oom.reading import Asked, OomError

PROOF = 5  # points of numbers that leave no other cause
CLUE = 4  # of a line above the message
LIKELY = 4
HINT = 2  # of numbers that other causes could have, too
MOST = 4  # causes that are shown
CONTEXT_BYTES = 2.5 * 2**30  # more than a CUDA context and NCCL take
OUTSIDE_SHARE = 0.1  # of the GPU: no more is outside PyTorch's numbers without another process
UNUSED_SHARE = 0.1  # of the GPU: PyTorch holds no more without use (memory_kinds.FRAGMENTATION is what is usual)
EMPTY = 0.05  # of the GPU: no model is there
STATES_SHARE = 0.9  # of the GPU: no room for a pass
STEPS = r"(?i:\bstep|\biter(?:ation)?|\bit)s?[ \]:=/]{1,3}(\d{1,9})|\b(\d{1,9})/\d{1,9} \["
MANY_STEPS = 10
KINDS = {"host": "host", "killed": "host", "pinned": "pinned", "shared memory": "shared_memory", "disk": "disk"}

# Points of a size. States come first: their sizes follow from the model alone. Almost any size is some number of
# tokens, so a match of tokens counts only if their number is known, or a multiple of 256.
OF_THE_MODEL = 5
KNOWN = 4  # as many tokens as a pass is said to have
EXACT = 3
IS_ROUND = 2
POSSIBLE = 1
ROUND = 256  # tokens: lengths and their products with rows are mostly multiples of it
LONGEST = 2**21  # tokens of a pass
FEWEST = 64

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

    @property
    def is_likely(self) -> bool:
        return self.points >= LIKELY


@dataclass(frozen=True)
class Match:
    """A tensor of the asked size. `factors` is its size as a person writes it."""

    cause: str
    factors: str
    points: int


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of a model and its passes. None is unknown."""

    vocabulary: int | None = None
    ffn: int | None = None
    heads: int = 1
    sequence: int | None = None
    rows: int = 1
    trained: int = 0  # parameters
    ranks: int = 1
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the weights
    buckets: dict[str, float] = field(default_factory=dict)  # elements


@functools.cache
def descriptions() -> dict[str, dict[str, str]]:
    return tomllib.loads(Path(__file__).with_name("causes.toml").read_text())


def causes(error: OomError, matches: list[Match], states_bytes: float | None, shards_weights: bool) -> list[Cause]:
    """Return the causes with the most points first.

    `states_bytes` are the weights, gradients and optimizer's states on a GPU, predicted.
    """
    if error.where in KINDS:
        signs = [(KINDS[error.where], PROOF, "the message says so")]
    else:
        signs = [*_clues(error), *_numbers(error), *_states(error, states_bytes)]
        signs += [(match.cause, match.points, "the size fits") for match in matches]
    for match in matches:
        if match.cause == "weights" and shards_weights:
            signs.append(("gather", match.points + 1, "the size is that of a weight, of which a rank holds a part"))
    if max((points for _, points, _ in signs), default=0) < HINT:
        signs.append(("activations", 1, "most messages without another sign are mended by smaller passes"))
    factors = {match.cause: match.factors for match in matches}
    values = {name: size(getattr(error, name) or 0) for name in ("total", "unallocated", "outside")}
    values["asked"] = error.asked.text if error.asked else "a tensor"
    ranked = []
    for id in [id for id in descriptions() if id in {cause for cause, _, _ in signs}]:
        text = descriptions()[id]
        what = text["what"].format(**values)
        if id in factors:
            what = f"{values['asked']} = {factors[id]}: {what}"
        reasons = tuple(dict.fromkeys(reason for cause, _, reason in signs if cause == id))
        points = sum(points for cause, points, _ in signs if cause == id)
        ranked.append(Cause(id, what, points, reasons, text["remedy"], text["apart"]))
    return sorted(ranked, key=lambda cause: -cause.points)[:MOST]


def _clues(error: OomError) -> Iterator[Sign]:
    """Yield what the lines above the error name, and what it means that many steps had passed."""
    for id, description in descriptions().items():
        if named := re.findall(description.get("clue", "(?!)"), error.context):
            yield id, CLUE, f"the text names {named[-1].strip(' (=')}"
    numbers = [int(match[1] or match[2]) for match in re.finditer(STEPS, error.context)]
    if numbers and numbers[-1] >= MANY_STEPS:
        is_small = error.asked is not None and error.asked.is_small
        reason = f"{numbers[-1]:,} steps had passed: these rows are longer, or something is kept"
        yield "leak" if is_small else "activations", HINT, reason


def _numbers(error: OomError) -> Iterator[Sign]:
    """Yield what the sizes in the message show by themselves."""
    if error.asked is None or error.total is None:
        if "CUDA error: out of memory" in error.line:
            yield "other_process", HINT, "the driver says it, and not PyTorch's allocator"
        return
    asked = error.asked.low
    if asked > error.total and (error.allocated or 0) <= EMPTY * error.total:
        yield "capacity", PROOF, f"the GPU has {size(error.total)}, and nothing else is on it"
    elif asked > error.total:
        yield "attention", HINT + 1, "it is larger than the GPU, and the square of the tokens makes such"
    outside = error.outside or 0
    unused = error.unallocated or 0
    free = error.free or 0
    if outside > max(OUTSIDE_SHARE * error.total, CONTEXT_BYTES) and free + outside >= asked:
        yield "other_process", PROOF, "PyTorch's numbers leave so much of the GPU unexplained"
    if unused >= max(asked, UNUSED_SHARE * error.total):
        yield "fragmentation", CLUE, "the unused part alone is larger than what was asked for"


def _states(error: OomError, states_bytes: float | None) -> Iterator[Sign]:
    """Yield whether weights, gradients and the optimizer's states leave room for a pass."""
    if states_bytes is None or error.total is None:
        return
    needed = f"weights, gradients and the optimizer's states need about {size(int(states_bytes))}"
    if states_bytes > STATES_SHARE * error.total:
        yield "weights", CLUE, f"{needed} of {size(error.total)}"
    elif states_bytes < error.total / 2:
        yield "activations", 1, f"{needed} of {size(error.total)}: what grows with tokens fills the rest"


def matches(asked: Asked, known: Known) -> list[Match]:
    """Return what has the asked size, the surest first and one for each cause."""
    best: dict[str, Match] = {}
    for match in sorted((*_of_the_model(asked, known), *_of_tokens(asked, known)), key=lambda match: -match.points):
        best.setdefault(match.cause, match)
    least = EXACT if any(match.points == OF_THE_MODEL for match in best.values()) else POSSIBLE
    return [match for match in best.values() if match.points >= least]


def _of_the_model(asked: Asked, known: Known) -> Iterator[Match]:
    """Yield tensors whose sizes do not depend on tokens."""
    tensors: list[tuple[str, float, str]] = []
    if known.trained:
        part = known.trained / known.ranks
        tensors.append(("optimizer", part, f"{known.trained:,} parameters / {known.ranks} ranks"))
        tensors.append(("optimizer", known.trained, f"{known.trained:,} parameters"))
    for name, elements in known.buckets.items():
        tensors.append(("buckets", elements, f"{elements:,.0f} elements of {name}"))
    for name, shape in known.shapes.items():
        if len(shape) > 1:
            tensors.append(("weights", math.prod(shape), f"{' x '.join(f'{side:,}' for side in shape)} of {name}"))
    for (cause, elements, text), element_bytes in itertools.product(tensors, (4, 2)):
        if asked.low <= elements * element_bytes <= asked.high:
            yield Match(cause, f"{text} x {element_bytes} bytes", OF_THE_MODEL if cause == "optimizer" else EXACT)


def _of_tokens(asked: Asked, known: Known) -> Iterator[Match]:
    """Yield logits, activations, and scores and masks of attention."""
    tokens = known.sequence and known.sequence * known.rows
    widths = {"logits": known.vocabulary, "activations": known.ffn}
    for (cause, width), element_bytes in itertools.product(widths.items(), (4, 2)):
        if width:
            token_bytes = width * element_bytes
            count, points = _count(asked.low / token_bytes, asked.high / token_bytes, tokens)
            if cause == "activations":  # weights have this width, too
                points -= 1
            yield Match(cause, f"{count:,} tokens x {width:,} x {element_bytes} bytes", points)
    for heads, element_bytes in itertools.product({known.heads, 1}, (4, 2, 1)):  # a mask has no heads
        unit = heads * known.rows * element_bytes
        length, points = _count(math.sqrt(asked.low / unit), math.sqrt(asked.high / unit), known.sequence)
        if points >= IS_ROUND:
            factors = f"{known.rows} rows x {heads} heads x {length:,} x {length:,} tokens x {element_bytes} bytes"
            yield Match("attention", factors, points)


def _count(low: float, high: float, known: int | None) -> tuple[int, int]:
    """Return a number of tokens between two, and how likely it is: known, round, or any. 0 points: there is none."""
    if known and low <= known <= high:
        return known, KNOWN
    least = max(math.ceil(low), FEWEST)
    if high < least or low > LONGEST:
        return 0, 0
    power = 1
    while high // (2 * power) * 2 * power >= least:
        power *= 2
    roundest = int(high // power * power)
    if roundest % ROUND:
        return roundest, POSSIBLE
    return roundest, IS_ROUND
