"""Compares losses seed by seed: whether those of two sides are equivalent, or those of the first side are lower."""

import functools
from collections.abc import Iterable
from typing import Literal

import numpy as np

from study.records import metrics, stats
from study.records.pairs import by_seed
from study.records.runs import Run
from study.records.stats import all_of, decided

LEVEL = 0.05  # of each of the two one-sided tests
QUARTERS = 4  # of a training curve, each of which must hold
Curve = Literal["train", "eval"]
Losses = dict[int | None, list[float]]  # by seed: the last evaluation, or the mean of each quarter of the curve


def compare(ours: Losses, theirs: Losses, margin: float, direction: str | None) -> tuple[bool | None, str]:
    """Return whether the losses of a cell are equivalent, or lower; and the worst part of the curve in words."""
    fewest = min(len(ours), len(theirs))
    if fewest < stats.FEWEST_RUNS:
        return None, f"{fewest} seeds, but {stats.FEWEST_RUNS} are needed"
    both = sorted(ours.keys() & theirs.keys(), key=str)
    is_paired = len(both) >= stats.FEWEST_RUNS
    our_parts = zip(*(ours[seed] for seed in (both if is_paired else ours)), strict=False)
    their_parts = zip(*(theirs[seed] for seed in (both if is_paired else theirs)), strict=False)
    tested = [_part(*losses, margin, is_paired, direction) for losses in zip(our_parts, their_parts, strict=False)]
    is_curve = max(map(len, ours.values())) > 1
    results = [(f"quarter {number}, " * is_curve, *test) for number, test in enumerate(tested, start=1)]
    if direction:
        results = results[-1:]
    name, _, _, words = max(results, key=lambda result: result[2])
    return all_of(answer for _, answer, _, _ in results), f"{name}{words}"


def _part(
    ours: tuple[float, ...], theirs: tuple[float, ...], margin: float, is_paired: bool, direction: str | None
) -> tuple[bool | None, float, str]:
    """Return whether the losses of a part of the curve are equivalent, or lower; the p-value; and the test in words."""
    scale = abs(float(np.mean(theirs)))
    test = stats.equivalence(ours, theirs, margin * scale, is_paired)
    low = test.low / scale
    high = test.high / scale
    noise = float(np.std(theirs, ddof=1)) / scale
    answer = decided(test.p < LEVEL, low > margin or high < -margin)
    how_sure = f"p {test.p:.2g} for"
    if direction:
        answer = decided(high < 0 and low <= -margin, low > -margin)
        how_sure = "5 % on each side, with"
    difference = f"{test.difference / scale:+.3%} apart, 90 % interval {low:+.3%} to {high:+.3%}"
    confidence = f"{how_sure} a margin of {margin:.3%}; seed to seed {noise:.3%}, {len(ours)} seeds"
    return answer, test.p, f"{difference}, {confidence}"


def of_seeds(runs: Iterable[Run], curve: Curve, training: int | None) -> Losses:
    """Return the mean losses of the runs of each seed."""
    curves = by_seed(runs, functools.partial(_losses, curve=curve, training=training))
    return {seed: _means(zip(*several, strict=False)) for seed, several in curves.items()}


def _losses(run: Run, curve: Curve, training: int | None) -> list[float] | None:
    """Return the last evaluation, or the mean of each quarter of the training curve."""
    if curve == "eval":
        last = metrics.value(run.record, "eval_loss", training)
        return None if last is None else [last]
    losses = metrics.curve(run.record, training)
    return _means(np.array_split(losses, min(QUARTERS, len(losses)))) if losses else None


def _means(parts: Iterable) -> list[float]:
    return [float(np.mean(part)) for part in parts]
