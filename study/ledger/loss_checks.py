"""The check of losses: whether trainings end alike, by two one-sided tests over seeds."""

from collections.abc import Iterable
from typing import Literal

import numpy as np

from study.errors import Stop
from study.ledger.evidence import Claimed, Evidence
from study.ledger.pairing import Pairs, Side, all_of, decided, fit_for, in_words, over_records, resting_on, two_sides
from study.ledger.verdict import Finding
from study.records import metrics, stats
from study.records.runs import Run

LEVEL = 0.05  # of each of the two one-sided tests
QUARTERS = 4  # of a training curve, each of which must hold
Curve = Literal["train", "eval"]
BySeed = dict[int | None, list[float]]  # the last evaluation, or the mean of each quarter of the curve


@over_records
def same_loss(
    evidence: Evidence,
    claim: Claimed,
    *,
    margin: float,
    arms: list[str] | None = None,
    of: Side = None,
    to: Side = None,
    where: Side = None,
    curve: Curve = "eval",
    direction: Literal["lower"] | None = None,
) -> Finding:
    """Return whether losses are equivalent: two one-sided tests over seeds, against a margin relative to the loss.

    Each quarter of a training curve is tested. Each of `arms` is compared with the first of them. With a direction, the
    question is whether the first side's losses are lower: a one-sided test, of a training curve's last quarter alone.
    Losses within the margin count as equal.
    """
    fit_for(claim, "eval_loss")
    words = []
    answers = []
    runs: list[Run] = []
    for ours, theirs in _compared_sides(arms, of, to):
        sides = two_sides(evidence, claim, ours, theirs, where, relative=True)
        first, second = sides.training
        cells = [(_by_seed(pair.of, curve, first), _by_seed(pair.to, curve, second), pair) for pair in sides.pairs]
        enough = [cell for cell in cells if min(len(cell[0]), len(cell[1])) >= stats.FEWEST_RUNS]
        for our_losses, their_losses, pair in enough or cells:  # too few seeds matter only if no cell has enough
            answer, working = _compare(our_losses, their_losses, margin, direction)
            answers.append(answer)
            words.append(f"{curve} loss with {in_words(ours)} against {in_words(theirs)}: {working}")
            runs += pair.of + pair.to
    value = all_of(answers)
    missing = "more seeds: see the working" if value is None else ""
    return resting_on(claim, runs, "; ".join(words), value, missing=missing)


def _compared_sides(arms: list[str] | None, of: Side, to: Side) -> Pairs:
    if arms is None and of is not None and to is not None:
        return [(of, to)]
    if arms is None or of is not None or to is not None:
        raise Stop("same_loss needs either arms, or of and to", "give one of the two")
    return [({"arm": arm}, {"arm": arms[0]}) for arm in arms[1:]]


def _compare(ours: BySeed, theirs: BySeed, margin: float, direction: str | None) -> tuple[bool | None, str]:
    """Return whether the losses of a cell are equivalent, or lower; and the worst part of the curve in words."""
    fewest = min(len(ours), len(theirs))
    if fewest < stats.FEWEST_RUNS:
        return None, f"{fewest} seeds, but {stats.FEWEST_RUNS} are needed"
    both = sorted(ours.keys() & theirs.keys(), key=str)
    is_paired = len(both) >= stats.FEWEST_RUNS
    our_parts = zip(*(ours[seed] for seed in (both if is_paired else ours)), strict=False)
    their_parts = zip(*(theirs[seed] for seed in (both if is_paired else theirs)), strict=False)
    parts = enumerate(zip(our_parts, their_parts, strict=False), start=1)
    is_curve = max(map(len, ours.values())) > 1
    results = [
        (f"quarter {number}, " * is_curve, *_part(*losses, margin, is_paired, direction)) for number, losses in parts
    ]
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


def _by_seed(runs: tuple[Run, ...], curve: Curve, training: int | None) -> BySeed:
    """Return the mean losses of the runs of each seed."""
    curves: dict[int | None, list[list[float]]] = {}
    for run in runs:
        losses = _last_loss(run, training) if curve == "eval" else _quarters(run, training)
        if losses:
            curves.setdefault(run.record.requested.seed, []).append(losses)
    return {seed: _means(zip(*several, strict=False)) for seed, several in curves.items()}


def _last_loss(run: Run, training: int | None) -> list[float]:
    last = metrics.value(run.record, "eval_loss", training)
    return [] if last is None else [last]


def _quarters(run: Run, training: int | None) -> list[float]:
    losses = metrics.curve(run.record, training) or []
    return _means(np.array_split(losses, min(QUARTERS, len(losses)))) if losses else []


def _means(parts: Iterable) -> list[float]:
    return [float(np.mean(part)) for part in parts]
