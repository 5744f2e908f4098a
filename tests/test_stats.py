"""The bootstrap: right where the answer is known, and the same twice from the same seed."""

import numpy as np
import pytest

from study.stats import median, paired_ratio, ratio_of_medians

SLOW = [2.0, 2.2, 1.9, 2.1, 2.4, 2.0, 2.3]
FAST = [1.0, 1.1, 0.9, 1.2, 1.0, 1.05, 0.95]
RATIOS = pytest.mark.parametrize("ratio_of", [ratio_of_medians, paired_ratio])


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_median_is_the_middle_and_needs_something():
    assert median([5, 1, 3]) == 3
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5
    with pytest.raises(ValueError, match="nothing"):
        median([])


def test_known_ratio():
    assert ratio_of_medians(SLOW, FAST, rng())[0] == pytest.approx(2.1)
    assert paired_ratio([2.0, 6.0, 20.0], [1.0, 2.0, 5.0], rng())[0] == pytest.approx(3)


@RATIOS
def test_a_constant_has_no_width(ratio_of):
    assert ratio_of([3.0] * 5, [1.5] * 5, rng()) == (2, 2, 2)


@RATIOS
def test_same_seed_same_interval(ratio_of):
    assert ratio_of(SLOW, FAST, rng(7)) == ratio_of(SLOW, FAST, rng(7))


def test_the_generator_alone_decides():
    noise = rng(1).lognormal(size=(2, 30))
    np.random.seed(0)  # noqa: NPY002  the state that must not matter
    before = ratio_of_medians(*noise, rng(7))
    np.random.seed(1)  # noqa: NPY002
    assert ratio_of_medians(*noise, rng(7)) == before
    assert ratio_of_medians(*noise, rng(8))[1:] != before[1:]


@RATIOS
def test_other_data_other_interval(ratio_of):
    assert ratio_of(SLOW, FAST, rng())[1:] != ratio_of(FAST, SLOW, rng())[1:]


@RATIOS
@pytest.mark.parametrize("seed", range(5))
def test_interval_holds_the_point(ratio_of, seed):
    a, b = rng(seed).lognormal(size=(2, 25))
    ratio, low, high = ratio_of(a, b, rng(seed))
    assert low < ratio < high
    narrow = ratio_of(a, b, rng(seed), level=0.5)
    assert low < narrow[1] < narrow[2] < high


@RATIOS
def test_identical_lists_have_ratio_1(ratio_of):
    ratio, low, high = ratio_of(SLOW, SLOW, rng())
    assert ratio == 1
    assert low <= 1 <= high


def test_pairs_cancel_what_both_feel():
    load = [1.0, 1.0, 3.0, 1.0, 5.0, 1.0, 2.0]  # the machine was busy in three of the repeats
    slow, fast = [2.0 * x for x in load], load
    assert paired_ratio(slow, fast, rng()) == (2, 2, 2)
    low, high = ratio_of_medians(slow, fast, rng())[1:]
    assert high - low > 1


def test_pairs_must_be_pairs():
    with pytest.raises(ValueError, match="zip"):
        paired_ratio([1.0, 2.0], [1.0], rng())


def test_interval_covers_the_truth_about_as_often_as_it_says():
    draws = rng(3).lognormal(sigma=0.3, size=(200, 2, 40))  # the true ratio of the medians is 1
    intervals = [ratio_of_medians(a, b, rng(i), resamples=300)[1:] for i, (a, b) in enumerate(draws)]
    assert 0.90 <= np.mean([low <= 1 <= high for low, high in intervals]) <= 0.99
