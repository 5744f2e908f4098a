"""Intervals of medians and their ratios by a percentile bootstrap, and equivalence tests of means.

Step times have a long tail on one side, so medians are compared without assuming a normal distribution. The generator
is an argument, never global state: the same numbers and seed give the same interval.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

FEWEST_RUNS = 3  # for an interval of time or loss: one or two runs do not show the spread
RESAMPLES = 2000


def decided(yes: bool, no: bool) -> bool | None:
    if yes:
        return True
    return False if no else None


def all_of(answers: Iterable[bool | None]) -> bool | None:
    """Return whether all answers are yes: no if any is no, else undecided if any is undecided."""
    known = set(answers)
    return decided(known <= {True}, False in known)


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
    ours = np.asarray(a, float)
    theirs = np.asarray(b, float)
    if min(len(ours), len(theirs)) < 2 or (paired and len(ours) != len(theirs)):
        raise ValueError("a test of means needs at least two values of each, and pairs need equally many")
    difference = float(ours.mean() - theirs.mean())
    spread = np.ptp(ours - theirs) if paired else max(np.ptp(ours), np.ptp(theirs))
    if spread == 0:  # so there is no uncertainty
        return Equivalence(difference, difference, difference, float(abs(difference) >= margin))

    from scipy.special import stdtr, stdtrit  # not a part of the light install; scipy.stats takes a second more

    error, freedom = _paired_error(ours - theirs) if paired else _welch_error(ours, theirs)
    p = max(stdtr(freedom, (difference - margin) / error), stdtr(freedom, (-margin - difference) / error))
    half = float(stdtrit(freedom, 0.95)) * error
    return Equivalence(difference, difference - half, difference + half, float(p))


def _paired_error(differences: np.ndarray) -> tuple[float, int]:
    """Return the standard error of the mean of differences, and the degrees of freedom."""
    count = len(differences)
    return float(differences.std(ddof=1)) / math.sqrt(count), count - 1


def _welch_error(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """Return the standard error of a difference of two means, and Welch's degrees of freedom."""
    errors = [float(each.var(ddof=1)) / len(each) for each in (ours, theirs)]
    parts = sum(error**2 / (len(each) - 1) for error, each in zip(errors, (ours, theirs), strict=True))
    return math.sqrt(sum(errors)), sum(errors) ** 2 / parts
