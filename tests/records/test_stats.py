"""The bootstrap: right where the answer is known, and the same twice from the same seed."""

import numpy as np
import pytest

from study.records import compare
from study.records.compare import median_with_interval

SLOW = [2.0, 2.2, 1.9, 2.1, 2.4, 2.0, 2.3]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_the_interval_is_that_of_the_resamples_drawn_one_by_one():
    """By hand, from the same generator: medians of samples with replacement, and their quantiles."""
    medians = np.median(rng(3).choice(SLOW, (2000, 7)), axis=1)
    expected = np.quantile(medians, [0.025, 0.975])
    assert median_with_interval(SLOW, rng(3)) == pytest.approx((2.1, *expected), rel=1e-12)


def test_interval_covers_the_truth_about_as_often_as_it_says(monkeypatch):
    monkeypatch.setattr(compare, "RESAMPLES", 300)
    draws = rng(3).lognormal(sigma=0.3, size=(200, 40))  # the true median is 1
    intervals = [median_with_interval(sample, rng(i))[1:] for i, sample in enumerate(draws)]
    assert 0.90 <= np.mean([low <= 1 <= high for low, high in intervals]) <= 0.99
