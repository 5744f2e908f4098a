"""Checks over records. The claim's conditions decide which of the evidence counts."""

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from study.claims import pairing
from study.claims.evidence import UNKNOWN, Chosen, Evidence, choose
from study.claims.model import MEASURED, TRENDS, Claim, Kind, as_list, is_number, one_argument
from study.claims.verdict import NOT_TESTED, Finding
from study.errors import Stop
from study.records import metrics, stats
from study.records.runs import Run

Table, Side = dict, dict | None
TRAINING = "training"  # in `of` and `to`: which of the published script's trainings
ANSWERS = ("done", "oom", "host_oom", "diverged")  # any other failure says nothing about the claim
REFUSED = "unavailable"  # by a library
LEVEL = 0.05  # of each of the two one-sided tests of losses
QUARTERS = 4  # of a training curve, each of which must hold


def not_tested(chosen: Chosen, where: Table) -> Finding:
    elsewhere = f"{len(chosen.others)} runs match, but none in the claim's conditions"
    working = elsewhere if chosen.others else f"no run has {in_words(where)}"
    return chosen.finding(working, without=NOT_TESTED, missing="runs in the claim's conditions")


def resting_on(claim: Claim, runs: Iterable[Run], working: str, **about) -> Finding:
    """A finding with its runs and how they differ from the claim's conditions."""
    runs = tuple(dict.fromkeys(runs))
    differs = choose(Evidence(runs), claim, {}, relative=True).differs
    return Chosen(runs, (), differs).finding(f"{working}, {len(runs)} runs", **about)


def fit_for(claim: Claim, quantity: str) -> None:
    """Times and losses decide only claims of their kind, because other kinds accept evidence from other machines."""
    sort = metrics.sort_of(quantity)
    if sort and claim.kind != sort:
        raise Stop(f"{quantity} is of kind {sort}, but the claim is of kind {claim.kind}", f"write kind = {sort!r}")


def observed(evidence: Evidence, claim: Claim, *, field: str, where: Table, over: str | None = None) -> Finding:
    """What the records have in a field, or that over another: a number with its range, or what they agree on."""
    for path in filter(None, (field, over)):
        metrics.refuse_unknown(path)
    if over is None:  # within a run the machine is the same
        fit_for(claim, field)
    chosen = choose(evidence, claim, where, relative=over is not None)
    if not chosen.runs:
        return not_tested(chosen, where)
    values = [metrics.dig(run.record, field) for run in chosen.runs]
    if over:
        below = [metrics.dig(run.record, over) for run in chosen.runs]
        values = [a / b if is_number(a) and is_number(b) and b else None for a, b in zip(values, below, strict=True)]
    known = [value for value in values if value is not None]
    name = f"{field} / {over}" if over else field
    about = f"{name} in {len(known)} runs: "
    if not known:
        return chosen.finding(f"{name} is not in the records", missing=f"records with {name}")
    if all(map(is_number, known)):
        if metrics.sort_of(field) and len(known) < stats.FEWEST_RUNS:
            return chosen.finding(f"{about}{known}", missing=f"{stats.FEWEST_RUNS} runs")
        span = min(known), max(known)
        return chosen.finding(about + _span(*span), value=stats.median(known), interval=span)
    if any(value != known[0] for value in known):
        unlike = ", ".join(sorted(set(map(str, known))))
        return chosen.finding(f"{about}they disagree ({unlike})", missing="records that agree")
    return chosen.finding(f"{about}{known[0]}", value=known[0])


def ran(evidence: Evidence, claim: Claim, *, where: Table, refused: bool = False) -> Finding:
    """How runs ended. Those whose weights have no values are left out: they need no memory, so they always succeed.

    With `refused`, that a library refuses is an answer as well.
    """
    with_values = {"init": [None, "pretrained", "random", "in_place"]}
    chosen = choose(evidence, claim, with_values | where, statuses=(*ANSWERS, REFUSED) if refused else ANSWERS)
    if not chosen.runs:
        return not_tested(chosen, where)
    ends = sorted({run.status for run in chosen.runs})
    working = f"{len(chosen.runs)} runs ended: {', '.join(ends)}"
    if len(ends) > 1:
        return chosen.finding(working, missing="runs that end alike")
    return chosen.finding(working, value=ends[0])


# --- two sides -----------------------------------------------------------------------------------------------------


class Sides(NamedTuple):
    """Two sides that both have runs, paired by equal cell."""

    chosen: Chosen  # of the first side
    pairs: list[pairing.Pair]
    refused: list[str]  # why other cells are not pairs
    training: tuple[int | None, int | None]  # of the published script


def two_sides(evidence: Evidence, claim: Claim, of: Table, to: Table, where: Side, relative: bool) -> Sides | Finding:
    """The Sides, or a Finding that says why they are not comparable."""
    chosen = []
    for side in (of, to):
        wanted = (where or {}) | {name: value for name, value in side.items() if name != TRAINING}
        chosen.append(choose(evidence, claim, wanted, relative))
        if not chosen[-1].runs:
            return not_tested(chosen[-1], wanted)
    pairs, refused = pairing.paired(chosen[0].runs, chosen[1].runs, {*of, *to} - {TRAINING})
    if not pairs:
        return unlike_cells(chosen[0], refused)
    return Sides(chosen[0], pairs, refused, (of.get(TRAINING), to.get(TRAINING)))


def unlike_cells(chosen: Chosen, reasons: list[str]) -> Finding:
    working = "; ".join(dict.fromkeys(reasons)) or "no cell was run on both sides"
    return chosen.finding(working, missing=f"runs that differ only in what is compared ({working})")


def compared(
    evidence: Evidence, claim: Claim, quantity: str, of: Table, to: Table, where: Side
) -> pairing.Ratio | Finding:
    """The ratio of a quantity on two sides, over all cells that were run on both; or why there is none."""
    fit_for(claim, quantity)
    metrics.value(UNKNOWN, quantity, of.get(TRAINING))
    relative = quantity.startswith(metrics.COMPONENT) or quantity == "states_bytes"
    sides = two_sides(evidence, claim, of, to, where, relative)
    if isinstance(sides, Finding):
        return sides
    ratios = [pairing.ratio(pair, quantity, sides.training) for pair in sides.pairs]
    if known := [ratio for ratio in ratios if isinstance(ratio, pairing.Ratio)]:
        return pairing.united(known)
    return unlike_cells(sides.chosen, [*sides.refused, *ratios])


def ratio(
    evidence: Evidence, claim: Claim, *, quantity: str, of: Table, to: Table, where: Side = None, saved: bool = False
) -> Finding:
    """A quantity in some runs over that in others, cell by equal cell, with its interval; or the share saved."""
    result = compared(evidence, claim, quantity, of, to, where)
    if isinstance(result, Finding):
        return result
    value, low, high = result.value, result.low, result.high
    what = f"{quantity} with {in_words(of)} over that with {in_words(to)}"
    if saved:
        value, low, high, what = 1 - value, 1 - high, 1 - low, f"saved of {what}"
    return resting_on(claim, result.runs, f"{what}: {_span(low, high, value)}", value=value, interval=(low, high))


def order(
    evidence: Evidence, claim: Claim, *, quantity: str, arms: list[str], where: Side = None, within: float = 0
) -> Finding:
    """Whether arms are in this order, from the best to the worst: yes, no, or undecided by the intervals.

    Arms that are equal within `within` are in order.
    """
    if len(arms) < 2:
        raise Stop(f"an order needs at least two arms (got {len(arms)})", "give arms = [best, ..., worst]")
    words, answers, runs = [], [], []
    for best, worst in itertools.pairwise(arms):
        result = compared(evidence, claim, quantity, {"arm": best}, {"arm": worst}, where)
        if isinstance(result, Finding):
            return result
        runs += result.runs
        words.append(f"{best} over {worst}: {_span(result.low, result.high, result.value)}")
        higher = quantity in metrics.HIGHER_IS_BETTER
        low, high = (result.low, result.high) if higher else (1 / result.high, 1 / result.low)
        answers.append(decided(low >= 1 - within, high < 1 - within))
    value = all_of(answers)
    missing = "more runs: an interval reaches both sides" if value is None else ""
    return resting_on(claim, runs, f"{quantity}, {'; '.join(words)}", value=value, missing=missing)


def measured_trend(
    evidence: Evidence, claim: Claim, *, quantity: str, along: dict[str, list], where: Side = None, within: float = 0
) -> Finding:
    """Whether a quantity of records "rises" or "falls" along the values of a fact of runs, in order, or "neither".

    Each value against the one before, in cells that are equal but for that fact. A change of at most `within` is none.
    """
    name, values = one_argument(along)
    words, rises, falls, runs = [], [], [], []
    for before, after in itertools.pairwise(values):
        result = compared(evidence, claim, quantity, {name: after}, {name: before}, where)
        if isinstance(result, Finding):
            return result
        runs += result.runs
        words.append(f"{name} {after} over {before}: {_span(result.low, result.high, result.value)}")
        rises.append(decided(result.low > 1 + within, result.high <= 1 + within))
        falls.append(decided(result.high < 1 - within, result.low >= 1 - within))
    up, down = all_of(rises), all_of(falls)
    value = "rises" if up else "falls" if down else "neither" if up is down is False else None
    missing = "more runs: an interval reaches both sides" if value is None else ""
    return resting_on(claim, runs, f"{quantity}, {'; '.join(words)}", value=value, missing=missing)


def decided(yes: bool, no: bool) -> bool | None:
    return True if yes else False if no else None


def all_of(answers: list[bool | None]) -> bool | None:
    """Whether all are so: no as soon as an answer is no, undecided if another is."""
    return False if False in answers else None if None in answers else True


def counted(
    evidence: Evidence,
    claim: Claim,
    *,
    where: Table,
    collective: str | list[str] = "all",
    per: Literal["parameters", "step"] = "step",
    over: Side = None,
    unit: Literal["volume", "tensors", "calls"] = "volume",
    node_ranks: int | None = None,
) -> Finding:
    """What collectives moved in a step: for each byte of weights, or as a ratio to the same cell elsewhere.

    With `node_ranks`, only what ranks of several nodes exchange counts, where so many ranks stand for a node. A single
    rank sends nothing, so it counts only if `where` asks for it.
    """
    if "ranks" not in where:
        evidence = replace(evidence, runs=tuple(run for run in evidence.runs if run.ranks != 1))
    kinds = None if collective == "all" else as_list(collective)
    what = f"{unit} of {'all collectives' if kinds is None else ', '.join(kinds)}"
    of_weights = per == "parameters" and over is None
    what += " over the bytes of all weights" if of_weights else ""
    what += f" between nodes of {node_ranks} ranks" if node_ranks else ""

    def moved(runs: tuple[Run, ...]) -> list[float]:
        sizes = [metrics.moved(run.record, kinds, unit, node_ranks) for run in runs]
        weights = [metrics.weight_bytes(run.record) if of_weights else 1 for run in runs]
        return [size / each for size, each in zip(sizes, weights, strict=True) if size is not None and each]

    if over is None:
        chosen = choose(evidence, claim, where)
        if not chosen.runs:
            return not_tested(chosen, where)
        if sizes := moved(chosen.runs):
            span = min(sizes), max(sizes)
            working = f"{what}, in {len(sizes)} runs: {_span(*span)}"
            return chosen.finding(working, value=stats.median(sizes), interval=span)
    else:
        sides = two_sides(evidence, claim, {}, over, where, relative=False)
        if isinstance(sides, Finding):
            return sides
        chosen, sizes = sides.chosen, [(moved(pair.of), moved(pair.to), pair) for pair in sides.pairs]
        known = [
            pairing.of_sizes(ours, theirs, pair) for ours, theirs, pair in sizes if ours and theirs and min(theirs)
        ]
        if known:
            value, low, high, runs = pairing.united(known)
            working = f"{what} over that with {in_words(over)}: {_span(low, high, value)}"
            return resting_on(claim, runs, working, value=value, interval=(low, high))
    return chosen.finding(f"{what} is not in the records", missing="runs with instruments")


def equal(
    evidence: Evidence, claim: Claim, *, field: str, of: Table, to: Table, where: Side = None, within: float = 0
) -> Finding:
    """Whether runs of two sides have the same in a field: numbers within a share of the second side's.

    Cell by equal cell, and seed by seed.
    """
    metrics.refuse_unknown(field)
    fit_for(claim, field)
    sides = two_sides(evidence, claim, of, to, where, relative=True)
    if isinstance(sides, Finding):
        return sides
    answers, runs = [], []
    for pair in sides.pairs:
        ours, theirs = (_fields_by_seed(side, field) for side in pair)
        # All runs of a seed against one of them: each with each would take minutes where there are hundreds.
        known = [(a, theirs[seed][0]) for seed in ours.keys() & theirs.keys() for a in (*ours[seed], *theirs[seed])]
        answers.append(all(_alike(a, b, within) for a, b in known) if known else None)
        runs += pair.of + pair.to
    value = all_of(answers)
    closely = f", within {within:g} of it" if within else ""
    working = f"{field} with {in_words(of)} is that with {in_words(to)}{closely} in {answers.count(True)} cells"
    working += f" of {len(answers)}"
    return resting_on(claim, runs, working, value=value, missing=f"records with {field}" if value is None else "")


def _fields_by_seed(runs: tuple[Run, ...], field: str) -> dict[int | None, list]:
    values: dict[int | None, list] = {}
    for run in runs:
        if (value := metrics.dig(run.record, field)) is not None:
            values.setdefault(run.seed, []).append(value)
    return values


def _alike(ours, theirs, within: float) -> bool:
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(_alike(a, b, within) for a, b in zip(ours, theirs, strict=True))
    if is_number(ours) and is_number(theirs):
        return abs(ours - theirs) <= within * abs(theirs)
    return ours == theirs


# --- losses --------------------------------------------------------------------------------------------------------


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

    Of a training curve, each of its quarters. `arms` are each compared with the first. With a direction, whether the
    first side's losses are lower: a one-sided test, of a training curve at its end. What is within the margin is equal.
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
        for pair, mine, other in [cell for cell in cells if min(map(len, cell[1:])) >= stats.FEWEST_RUNS] or cells:
            answer, working = _same(mine, other, margin, curve, direction)
            answers.append(answer)
            words.append(f"{in_words(ours)} against {in_words(theirs)}: {working}")
            runs += pair.of + pair.to
    value = all_of(answers)
    missing = "more seeds: see the working" if value is None else ""
    return resting_on(claim, runs, "; ".join(words), value=value, missing=missing)


def _same(ours: dict, theirs: dict, margin: float, curve: str, direction: str | None) -> tuple[bool | None, str]:
    """Whether the losses of a cell, by seed, are equivalent or lower, and the worst part of the curve in words."""
    if min(len(ours), len(theirs)) < stats.FEWEST_RUNS:
        return None, f"{min(len(ours), len(theirs))} seeds, but {stats.FEWEST_RUNS} are needed"
    both = sorted(ours.keys() & theirs.keys(), key=str)
    if is_paired := len(both) >= stats.FEWEST_RUNS:
        ours, theirs = ({seed: side[seed] for seed in both} for side in (ours, theirs))
    answers, words = [], []
    parts = zip(zip(*ours.values(), strict=False), zip(*theirs.values(), strict=False), strict=False)
    for number, (mine, other) in list(enumerate(parts, start=1))[-1 if direction else None :]:
        scale = abs(float(np.mean(other)))
        test = stats.equivalence(mine, other, margin * scale, is_paired)
        low, high, noise = test.low / scale, test.high / scale, float(np.std(other, ddof=1)) / scale
        if direction:
            answers.append(decided(high < 0 and low <= -margin, low > -margin))
        else:
            answers.append(decided(test.p < LEVEL, low > margin or high < -margin))
        what = "eval loss" if curve == "eval" else f"train loss, quarter {number},"
        apart = f"{what} {test.difference / scale:+.3%} apart, 90 % interval {low:+.3%} to {high:+.3%}"
        how_sure = "5 % on each side, with" if direction else f"p {test.p:.2g} for"
        confidence = f"{how_sure} a margin of {margin:.3%}; seed to seed {noise:.3%}, {len(mine)} seeds"
        words.append((test.p, f"{apart}, {confidence}"))
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


# --- words ---------------------------------------------------------------------------------------------------------


def in_words(table: Table) -> str:
    return " ".join(f"{name} {' or '.join(map(str, as_list(value)))}" for name, value in table.items())


def _span(low: float, high: float, middle: float | None = None) -> str:
    if low == high:
        return f"{low:.4g}"
    return f"{low:.4g} to {high:.4g}" if middle is None else f"{middle:.4g} ({low:.4g} to {high:.4g})"


def _unit(name: str, arguments: dict) -> str | None:
    """The unit of what a check over records finds."""
    if name == "counted":
        is_ratio = arguments.get("per") == "parameters" or arguments.get("over")
        return "number" if is_ratio or arguments.get("unit") == "calls" else "bytes"
    if name == "observed":
        return None if arguments.get("over") else metrics.unit_of(str(arguments.get("field")))
    return "number"


CHECKS = (ran, counted, ratio, order, measured_trend, observed, equal, same_loss)
FINDS = {"ran": (*ANSWERS, REFUSED), "measured_trend": TRENDS}
KINDS = {
    check.__name__: Kind(MEASURED, {"": check}, unit=_unit, finds=FINDS.get(check.__name__, ())) for check in CHECKS
}
