"""Intervals of medians and their ratios by a percentile bootstrap, and equivalence tests of means.

Step times have a long tail on one side, so medians are compared without assuming a normal distribution. The generator
is an argument, never global state: the same numbers and seed give the same interval.
"""

import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


def paired_ratio(a: Sequence[float], b: Sequence[float], rng: np.random.Generator) -> tuple[float, float, float]:
    """The median of a[i] / b[i] and the ends of its 95 % interval; pairs are resampled together.

    For interleaved repeats: a slow phase of the machine affects both values of a pair and cancels out.
    """
    return median_with_interval([x / y for x, y in zip(a, b, strict=True)], rng)


def _interval(statistic: Callable, samples: list[Sequence[float]], rng: np.random.Generator) -> tuple[float, float]:
    resamples = [rng.choice(np.asarray(sample, float), (RESAMPLES, len(sample))) for sample in samples]
    low, high = np.quantile(statistic(*resamples, axis=1), [0.025, 0.975])
    return float(low), float(high)


@dataclass(frozen=True)
class Equivalence:
    """The difference of two means, and the evidence that it is smaller than a margin."""

    difference: float
    low: float  # with `high`, the 90 % interval of the difference: 5 % at each end
    high: float
    p: float  # of a difference this small or smaller, if the true difference were as large as the margin


def equivalence(a: Sequence[float], b: Sequence[float], margin: float, paired: bool) -> Equivalence:
    """Two one-sided t-tests (Schuirmann 1987) of mean(a) - mean(b) against a margin fixed beforehand.

    Paired if a[i] and b[i] share what makes runs differ, such as a seed; else Welch's test, for unequal variances.
    """
    ours, theirs = np.asarray(a, float), np.asarray(b, float)
    if min(len(ours), len(theirs)) < 2 or (paired and len(ours) != len(theirs)):
        raise ValueError("a test of means needs at least two values of each, and pairs need equally many")
    difference = float(ours.mean() - theirs.mean())
    spread = np.ptp(ours - theirs) if paired else max(np.ptp(ours), np.ptp(theirs))
    if spread == 0:  # so there is no uncertainty
        return Equivalence(difference, difference, difference, float(abs(difference) >= margin))

    from scipy import stats  # not a part of the light install; it takes most of a second

    def test(shift: float, alternative: str) -> Any:
        if paired:
            return stats.ttest_1samp(ours - theirs, shift, alternative=alternative)
        return stats.ttest_ind(ours - shift, theirs, equal_var=False, alternative=alternative)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # scipy warns of losses that agree to the last digit
        p = max(test(margin, "less").pvalue, test(-margin, "greater").pvalue)
        interval = test(0, "two-sided").confidence_interval(0.90)
    return Equivalence(difference, float(interval.low), float(interval.high), float(p))
