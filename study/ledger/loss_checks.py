"""The check of losses: whether those of several arms are equivalent, or lower."""

from typing import Literal

import numpy as np

from study.errors import Stop
from study.ledger.evidence import Evidence
from study.ledger.model import Claim
from study.ledger.two_sides import Side, all_of, decided, fit_for, in_words, resting_on, two_sides
from study.ledger.verdict import Finding
from study.records import metrics, stats
from study.records.runs import Run

LEVEL = 0.05  # of each of the two one-sided tests of losses
QUARTERS = 4  # of a training curve, each of which must hold


def same_loss(
    evidence: Evidence,
    claim: Claim,
    *,
    margin: float,
    arms: list[str] | None = None,
    of: Side = None,
    to: Side = None,
    where: Side = None,
    curve: Literal["train", "eval"] = "eval",
    direction: Literal["lower"] | None = None,
) -> Finding:
    """Whether losses are equivalent: two one-sided tests over seeds, against a margin relative to the loss.

    Each quarter of a training curve is tested. Each of `arms` is compared with the first of them. With a direction, the
    question is whether the first side's losses are lower: a one-sided test, of a training curve's last quarter alone.
    Losses within the margin count as equal.
    """
    if (arms is None) == (of is None or to is None):
        raise Stop("same_loss needs either arms, or of and to", "give one of the two")
    fit_for(claim, "eval_loss")
    words, answers, runs = [], [], []
    for ours, theirs in [(of, to)] if arms is None else [({"arm": arm}, {"arm": arms[0]}) for arm in arms[1:]]:
        sides = two_sides(evidence, claim, ours, theirs, where, relative=True)
        if isinstance(sides, Finding):
            return sides
        cells = [(pair, *map(_by_seed, pair, (curve, curve), sides.training)) for pair in sides.pairs]
        # Too few seeds matter only if no cell has enough.
        for pair, *losses in [cell for cell in cells if min(map(len, cell[1:])) >= stats.FEWEST_RUNS] or cells:
            answer, working = _same(*losses, margin, curve, direction)
            answers.append(answer)
            words.append(f"{in_words(ours)} against {in_words(theirs)}: {working}")
            runs += pair.of + pair.to
    value = all_of(answers)
    missing = "more seeds: see the working" if value is None else ""
    return resting_on(claim, runs, "; ".join(words), value=value, missing=missing)


def _same(ours: dict, theirs: dict, margin: float, curve: str, direction: str | None) -> tuple[bool | None, str]:
    """Whether the losses of a cell are equivalent, or lower; and the worst part of the curve in words."""
    if min(len(ours), len(theirs)) < stats.FEWEST_RUNS:
        return None, f"{min(len(ours), len(theirs))} seeds, but {stats.FEWEST_RUNS} are needed"
    both = sorted(ours.keys() & theirs.keys(), key=str)
    if is_paired := len(both) >= stats.FEWEST_RUNS:
        ours, theirs = ({seed: side[seed] for seed in both} for side in (ours, theirs))
    answers, words = [], []
    parts = zip(zip(*ours.values(), strict=False), zip(*theirs.values(), strict=False), strict=False)
    for number, (our_losses, their_losses) in list(enumerate(parts, start=1))[-1 if direction else None :]:
        scale = abs(float(np.mean(their_losses)))
        test = stats.equivalence(our_losses, their_losses, margin * scale, is_paired)
        low, high, noise = test.low / scale, test.high / scale, float(np.std(their_losses, ddof=1)) / scale
        if direction:
            answers.append(decided(high < 0 and low <= -margin, low > -margin))
        else:
            answers.append(decided(test.p < LEVEL, low > margin or high < -margin))
        what = "eval loss" if curve == "eval" else f"train loss, quarter {number},"
        difference = f"{what} {test.difference / scale:+.3%} apart, 90 % interval {low:+.3%} to {high:+.3%}"
        how_sure = "5 % on each side, with" if direction else f"p {test.p:.2g} for"
        confidence = f"{how_sure} a margin of {margin:.3%}; seed to seed {noise:.3%}, {len(our_losses)} seeds"
        words.append((test.p, f"{difference}, {confidence}"))
    return all_of(answers), max(words)[1]


def _by_seed(runs: tuple[Run, ...], curve: str, training: int | None) -> dict[int | None, list[float]]:
    """The mean losses of the runs of each seed: of the last evaluation, or of each quarter of the curve."""
    curves: dict[int | None, list[list[float]]] = {}
    for run in runs:
        last, losses = metrics.value(run.record, "eval_loss", training), metrics.curve(run.record, training)
        if curve == "eval" and last is not None:
            curves.setdefault(run.seed, []).append([last])
        elif curve == "train" and losses:
            quarters = np.array_split(losses, min(QUARTERS, len(losses)))
            curves.setdefault(run.seed, []).append([float(np.mean(part)) for part in quarters])
    return {seed: [float(np.mean(part)) for part in zip(*several, strict=False)] for seed, several in curves.items()}
