"""Ratios of two predicted steps against ratios that others published, and the interval of a predicted ratio.

A pair is two rows of one source, model, machine and sequence length, whose trainings differ in their arm or in their
precision. The pairs of a source are correlated, so each source has the same weight. No published pair is of offloading.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean, median
from typing import NamedTuple

from study.predictor.outside import stored
from study.predictor.outside.published import Row
from study.predictor.timing.steptime import StepTime

# The share of pairs inside the interval. With 0.8, as for a single step, the interval of the others covers only three
# quarters of the pairs of a source that is left out.
COVERAGE = 0.9
Groups = dict[str, list[float]]  # by source: logarithms of how far predicted ratios are from published ones


@dataclass(frozen=True)
class Accuracy:
    """How far predicted ratios are from published ones, as factors."""

    pairs: int
    sources: int
    factor: float  # divides and multiplies a predicted ratio, for its interval
    median: float
    worst: float
    left_out: float  # the share inside the interval that the other sources give, the mean over the sources

    def __str__(self) -> str:
        return f"{self.pairs} pairs of published steps, {self.sources} sources"


def _training(row: Row) -> tuple:
    return row.deepspeed, row.fsdp, row.group, row.dtype


class Pair(NamedTuple):
    """The seconds of a step over those of another, as published and as predicted."""

    source: str
    published: float
    predicted: float


def pairs() -> list[Pair]:
    """Return all pairs, each pair of numbers once."""
    groups = defaultdict(list)
    for member in stored.predictions():
        row = member.row
        for step in (each for each in member.quantities if each.quantity == "time"):
            groups[row.source, row.config, row.gpu_name, row.n_gpus, row.seq].append((row, step))
    numbers = {
        (row.source, step.measured, step.predicted, other_step.measured, other_step.predicted)
        for members in groups.values()
        for (row, step), (other, other_step) in itertools.combinations(members, 2)
        if _training(row) != _training(other)
    }
    return [
        Pair(source, step / other, predicted / other_predicted)
        for source, step, predicted, other, other_predicted in numbers
    ]


@functools.cache
def accuracy() -> Accuracy:
    """Return how accurate predicted ratios are."""
    groups: Groups = defaultdict(list)
    for pair in pairs():
        groups[pair.source].append(abs(math.log(pair.predicted / pair.published)))
    errors = [error for group in groups.values() for error in group]
    inside = []
    for name, group in groups.items():
        limit = _limit(other for source, other in groups.items() if source != name)
        inside.append(mean(error <= limit for error in group))
    return Accuracy(
        pairs=len(errors),
        sources=len(groups),
        factor=math.exp(_limit(groups.values())),
        median=math.exp(median(errors)),
        worst=math.exp(max(errors)),
        left_out=mean(inside),
    )


def _limit(groups: Iterable[list[float]]) -> float:
    """Return the error that COVERAGE of the pairs do not exceed, each source with the same weight."""
    weighted = sorted((error, 1 / len(group)) for group in groups for error in group)
    share = COVERAGE * sum(weight for _, weight in weighted)
    reached = itertools.accumulate(weight for _, weight in weighted)
    return next(error for (error, _), sum_ in zip(weighted, reached, strict=True) if sum_ >= share - 1e-9)


def interval(step: StepTime, over: StepTime) -> tuple[float, float, str]:
    """Return the interval of a ratio of two predicted steps on one machine, and where it is from.

    Its width is that of ratios which others published. None of those is of offloading. The host's speed is uncertain,
    and the same on both sides.
    """
    if "host link" in {*step.parts, *over.parts}:
        words = "if the two predictions err in opposite directions"
        return step.low_s / over.high_s, step.high_s / over.low_s, words
    known = accuracy()
    ends = (step.seconds / over.seconds, step.least_s / over.least_s, step.most_s / over.most_s)
    return min(ends) / known.factor, max(ends) * known.factor, f"by {known}"
