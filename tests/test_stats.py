"""The bootstrap: right where the answer is known, and the same twice from the same seed."""

import numpy as np
import pytest

from study.records import stats
from study.records.stats import Equivalence, equivalence, median, paired_ratio, ratio_of_medians

SLOW = [2.0, 2.2, 1.9, 2.1, 2.4, 2.0, 2.3]
FAST = [1.0, 1.1, 0.9, 1.2, 1.0, 1.05, 0.95]
RATIOS = pytest.mark.parametrize("ratio_of", [ratio_of_medians, paired_ratio])


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_median_is_the_middle_and_needs_something():
    assert median([5, 1, 3]) == 3
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5
    with pytest.raises(ValueError, match="empty data"):
        median([])


def test_known_ratio():
    assert ratio_of_medians(SLOW, FAST, rng())[0] == pytest.approx(2.1)
    assert paired_ratio([2.0, 6.0, 20.0], [1.0, 2.0, 5.0], rng())[0] == pytest.approx(3)


def test_the_interval_is_that_of_the_resamples_drawn_one_by_one():
    """By hand, from the same generator: medians of samples with replacement, and their quantiles."""
    generator = rng(3)
    medians = [np.median(generator.choice(sample, (2000, 7)), axis=1) for sample in (SLOW, FAST)]
    expected = np.quantile(medians[0] / medians[1], [0.025, 0.975])
    assert ratio_of_medians(SLOW, FAST, rng(3))[1:] == pytest.approx(tuple(expected), rel=1e-12)


@RATIOS
def test_interval_holds_the_point(ratio_of):
    for seed in range(5):
        ratio, low, high = ratio_of(*rng(seed).lognormal(size=(2, 25)), rng(seed))
        assert low < ratio < high
    ratio, low, high = ratio_of(SLOW, SLOW, rng())
    assert low <= ratio == 1 <= high


def test_pairs_cancel_what_both_feel():
    load = [1.0, 1.0, 3.0, 1.0, 5.0, 1.0, 2.0]  # the machine was busy in three of the repeats
    slow, fast = [2.0 * x for x in load], load
    assert paired_ratio(slow, fast, rng()) == (2, 2, 2)
    low, high = ratio_of_medians(slow, fast, rng())[1:]
    assert high - low > 1


def test_interval_covers_the_truth_about_as_often_as_it_says(monkeypatch):
    monkeypatch.setattr(stats, "RESAMPLES", 300)
    draws = rng(3).lognormal(sigma=0.3, size=(200, 2, 40))  # the true ratio of the medians is 1
    intervals = [ratio_of_medians(a, b, rng(i))[1:] for i, (a, b) in enumerate(draws)]
    assert 0.90 <= np.mean([low <= 1 <= high for low, high in intervals]) <= 0.99


# --- equivalence ---------------------------------------------------------------------------------------------------


def test_equivalence_by_hand():
    """Differences 1, 2, 3: mean 2, error 1 / sqrt(3), two degrees of freedom."""
    result = equivalence([2, 4, 6], [1, 2, 3], margin=5, paired=True)
    assert result.difference == 2
    quantile = 2.919986  # of Student's t with two degrees of freedom, 95 %
    assert (result.low, result.high) == pytest.approx((2 - quantile / 3**0.5, 2 + quantile / 3**0.5), abs=1e-5)
    above = 0.5 * (1 - 27**0.5 / (2 + 27) ** 0.5)  # with two degrees of freedom the area has a closed form
    assert result.p == pytest.approx(above)


def test_welchs_test_by_hand():
    """Means 2 and 5, variances 1 and 4 over 3 and 4 runs: error sqrt(1/3 + 1)."""
    result = equivalence([1, 2, 3], [3, 5, 5, 7], margin=4, paired=False)
    parts = 1 / 3, (8 / 3) / 4
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 2 + parts[1] ** 2 / 3)
    assert freedom == pytest.approx(4.909, abs=1e-3)
    quantile = 2.0206  # interpolated in a table between 2.1318 for 4 and 2.0150 for 5
    assert result.difference == -3
    assert (result.low, result.high) == pytest.approx((-3 - quantile, -3 + quantile), abs=0.01)


@pytest.mark.parametrize("paired", [True, False])
def test_p_is_below_five_percent_where_the_interval_is_within_the_margin(paired):
    """The two ways to say it are one."""
    a, b = rng(1).normal(0, 1, 12), rng(2).normal(0.1, 1, 12)
    for margin in np.linspace(0.05, 3, 40):
        tested = equivalence(a, b, margin, paired)
        assert (tested.p < 0.05) == (-margin < tested.low and tested.high < margin)


def test_the_same_difference_every_time_leaves_no_doubt():
    assert equivalence([1, 2, 3], [1, 2, 3], 0.1, paired=True) == Equivalence(0, 0, 0, 0)
    assert equivalence([2, 3, 4], [1, 2, 3], 0.1, paired=True).p == 1
    assert equivalence([1, 1, 1], [1, 1, 1], 0.1, paired=False).p == 0


def test_one_of_each_is_no_test():
    with pytest.raises(ValueError, match="at least two values of each"):
        equivalence([1], [1, 2], 1, paired=False)
    with pytest.raises(ValueError, match="equally many"):
        equivalence([1, 2, 3], [1, 2], 1, paired=True)
