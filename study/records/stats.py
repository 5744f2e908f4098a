"""Intervals of medians and their ratios by a percentile bootstrap.

Step times have a long tail on one side, so medians are compared without assuming a normal distribution. The generator
is an argument, never global state: the same numbers and seed give the same interval.
"""

import statistics
from collections.abc import Callable, Sequence

import numpy as np

FEWEST_RUNS = 3  # for an interval of time or loss: one or two runs do not show the spread
RESAMPLES = 2000


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def median_with_interval(values: Sequence[float], rng: np.random.Generator) -> tuple[float, float, float]:
    """The median and the ends of its 95 % interval."""
    return median(values), *_interval(np.median, [values], rng)


def ratio_of_medians(a: Sequence[float], b: Sequence[float], rng: np.random.Generator) -> tuple[float, float, float]:
    """median(a) / median(b) of independent samples, and the ends of its 95 % interval."""

    def ratio(a, b, axis):
        return np.median(a, axis=axis) / np.median(b, axis=axis)

    return median(a) / median(b), *_interval(ratio, [a, b], rng)


def _interval(statistic: Callable, samples: list[Sequence[float]], rng: np.random.Generator) -> tuple[float, float]:
    resamples = [rng.choice(np.asarray(sample, float), (RESAMPLES, len(sample))) for sample in samples]
    low, high = np.quantile(statistic(*resamples, axis=1), [0.025, 0.975])
    return float(low), float(high)
