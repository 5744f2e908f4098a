"""Match the size of a tensor with what a training makes: states, weights, buckets, logits, scores of attention.

States come first: their sizes follow from the model alone. Almost any size is some number of tokens, so a match of
tokens counts only if their number is known, or a multiple of 256.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from study.watch.oom.reading import Asked

ROUND = 256  # tokens: lengths and their products with rows are mostly multiples of it
LONGEST = 2**21  # tokens of a pass
FEWEST = 64
OF_THE_MODEL = 5
KNOWN = 4  # as many tokens as a pass is said to have
EXACT = 3
IS_ROUND = 2
POSSIBLE = 1


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
    heads: int | None = None
    sequence: int | None = None
    rows: int | None = None
    trained: int | None = None  # parameters
    ranks: int = 1
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the weights
    buckets: dict[str, float] = field(default_factory=dict)  # elements


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
    tensors += [
        ("buckets", elements, f"{elements:,.0f} elements of {name}") for name, elements in known.buckets.items()
    ]
    for name, shape in known.shapes.items():
        if len(shape) > 1:
            tensors.append(("weights", math.prod(shape), f"{' x '.join(f'{side:,}' for side in shape)} of {name}"))
    for (cause, elements, text), element_bytes in itertools.product(tensors, (4, 2)):
        if asked.low <= elements * element_bytes <= asked.high:
            yield Match(cause, f"{text} x {element_bytes} bytes", OF_THE_MODEL if cause == "optimizer" else EXACT)


def _of_tokens(asked: Asked, known: Known) -> Iterator[Match]:
    """Yield logits, activations, and scores and masks of attention."""
    tokens = known.sequence and known.sequence * (known.rows or 1)
    widths = {"logits": known.vocabulary, "activations": known.ffn}
    for (cause, width), element_bytes in itertools.product(widths.items(), (4, 2)):
        if width:
            count, points = _count(asked.low / (width * element_bytes), asked.high / (width * element_bytes), tokens)
            if cause == "activations":  # weights have this width, too
                points -= 1
            yield Match(cause, f"{count:,} tokens x {width:,} x {element_bytes} bytes", points)
    rows = known.rows or 1
    for heads, element_bytes in itertools.product({known.heads or 1, 1}, (4, 2, 1)):  # a mask has no heads
        unit = heads * rows * element_bytes
        length, points = _count(math.sqrt(asked.low / unit), math.sqrt(asked.high / unit), known.sequence)
        if points >= IS_ROUND:
            factors = f"{rows} rows x {heads} heads x {length:,} x {length:,} tokens x {element_bytes} bytes"
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
    return (roundest, IS_ROUND) if roundest % ROUND == 0 else (roundest, POSSIBLE)
