"""Medians and how sure one can be of their ratio: the percentile bootstrap, from a generator that the caller owns.

Step times have long tails to one side, so medians are compared, and no normal distribution is assumed. The generator is
an argument, never global state: the same numbers and the same seed give the same interval, whatever ran before.
"""

from collections.abc import Sequence

import numpy as np


def median(values: Sequence[float]) -> float:
    if len(values) == 0:
        raise ValueError("the median of nothing")
    return float(np.median(values))


def ratio_of_medians(
    a: Sequence[float], b: Sequence[float], rng: np.random.Generator, resamples: int = 2000, level: float = 0.95
) -> tuple[float, float, float]:
    """median(a) / median(b) and the ends of its interval. `a` and `b` were measured apart and are drawn apart."""
    low, high = _interval(_medians(a, rng, resamples) / _medians(b, rng, resamples), level)
    return median(a) / median(b), low, high


def paired_ratio(
    a: Sequence[float], b: Sequence[float], rng: np.random.Generator, resamples: int = 2000, level: float = 0.95
) -> tuple[float, float, float]:
    """The median of a[i] / b[i] and the ends of its interval, pairs drawn together.

    For repeats that were interleaved: what slows the machine down for a while slows both of a pair, and cancels out.
    """
    ratios = [one / other for one, other in zip(a, b, strict=True)]
    low, high = _interval(_medians(ratios, rng, resamples), level)
    return median(ratios), low, high


def _medians(values: Sequence[float], rng: np.random.Generator, resamples: int) -> np.ndarray:
    """The median of each of many samples, each as large as `values` and drawn from them with replacement."""
    return np.median(rng.choice(np.asarray(values, float), (resamples, len(values))), axis=1)


def _interval(estimates: np.ndarray, level: float) -> tuple[float, float]:
    low, high = np.quantile(estimates, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
