"""Ratios of two predicted steps against ratios that others published, and the interval of a predicted ratio.

A pair is two rows of one source, model, machine and sequence length, whose trainings differ in their arm or in their
precision. The pairs of a source are correlated, so each source has the same weight. No published pair is of offloading.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from study.predictor.outside import scores
from study.predictor.outside.published import KNOWN, Row, rows
from study.predictor.step_time import StepTime

# The share of pairs inside the interval. With 0.8, as for a single step, the interval of the others covers only three
# quarters of the pairs of a source that is left out.
COVERAGE = 0.9


class Accuracy(NamedTuple):
    """How far predicted ratios are from published ones."""

    pairs: int
    sources: int
    factor: float  # divides and multiplies a predicted ratio, for its interval


def _training(row: Row) -> tuple:
    return row.deepspeed, row.fsdp, row.group, row.dtype


def errors() -> dict[str, list[float]]:
    """Return by source the logarithms of how far predicted ratios are from published ones, each pair of numbers once.

    A ratio is the seconds of a step over those of another.
    """
    groups = defaultdict(list)
    by_key = {row.key: row for row in rows()}
    for step in scores.numbers():
        if step.set == KNOWN and step.quantity == "time" and step.ours:
            row = by_key[step.key]
            times = (step.measured, step.ours)
            groups[row.source, row.config, row.gpu_name, row.n_gpus, row.seq].append((row, times))
    numbers = {
        (row.source, *times, *other_times)
        for members in groups.values()
        for (row, times), (other, other_times) in itertools.combinations(members, 2)
        if _training(row) != _training(other)
    }
    off = defaultdict(list)
    for source, measured, predicted, other_measured, other_predicted in numbers:
        off[source].append(abs(math.log((predicted / other_predicted) / (measured / other_measured))))
    return off


@functools.cache
def accuracy() -> Accuracy:
    groups = errors()
    return Accuracy(sum(map(len, groups.values())), len(groups), math.exp(quantile(groups.values(), COVERAGE)))


def quantile(groups: Iterable[Sequence[float]], share: float) -> float:
    """Return a weighted quantile: the least number below which this share lies. Each group has the same weight."""
    groups = list(groups)
    weighted = sorted((number, 1 / len(group)) for group in groups for number in group)
    reached = itertools.accumulate(weight for _, weight in weighted)
    enough = share * len(groups) - 1e-9
    return next(number for (number, _), weight in zip(weighted, reached, strict=True) if weight >= enough)


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
    words = f"by {known.pairs} pairs of published steps, {known.sources} sources"
    return min(ends) / known.factor, max(ends) * known.factor, words
