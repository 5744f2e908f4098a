"""Checks over records. The claim's conditions decide which runs count."""

import itertools
from dataclasses import dataclass, replace
from typing import Literal

from study.errors import Stop
from study.io.numbers import is_number, number_of
from study.ledger.arguments import as_list
from study.ledger.choosing import Chosen, Claimed
from study.ledger.pairing import (
    Side,
    Table,
    compared,
    counting,
    fit_for,
    in_words,
    over_records,
    resting_on,
    span_words,
    two_sides,
)
from study.ledger.verdict import Finding
from study.records import losses, metrics, stats
from study.records.evidence import Evidence
from study.records.pairs import Pair, Ratio, by_seed, of_sizes, united
from study.records.runs import Run
from study.records.stats import all_of, decided

ANSWERS = ("done", "oom", "host_oom", "diverged")  # any other failure says nothing about the claim
REFUSED = "unavailable"  # by a library
WITH_VALUES = {"init": [None, "pretrained", "random", "in_place"]}
UNDECIDED = "more runs: an interval reaches both sides"


# --- one side ------------------------------------------------------------------------------------------------------


@over_records
def observed(evidence: Evidence, claim: Claimed, *, field: str, where: Table, over: str | None = None) -> Finding:
    """Return the value of a field, or its ratio to another: a number with its range, or what all records agree on."""
    for path in filter(None, (field, over)):
        metrics.refuse_unknown(path)
    if over is None:  # a ratio within a run does not depend on the machine
        fit_for(claim, field)
    chosen = counting(evidence, claim, where, relative=over is not None)
    name = f"{field} / {over}" if over else field
    known = [value for run in chosen.runs if (value := _field(run, field, over)) is not None]
    about = f"{name} in {number_of(len(known), 'runs')}: "
    if not known:
        return chosen.finding(f"{name} is not in the records", missing=f"records with {name}")
    numbers = list(filter(is_number, known))
    if len(numbers) == len(known):
        if metrics.sort_of(field) and len(known) < stats.FEWEST_RUNS:
            return chosen.finding(f"{about}{known}", missing=f"{stats.FEWEST_RUNS} runs")
        return _middle_of(chosen, about, numbers)
    if any(value != known[0] for value in known):
        unlike = ", ".join(sorted(set(map(str, known))))
        return chosen.finding(f"{about}they disagree ({unlike})", missing="records that agree")
    return chosen.finding(f"{about}{known[0]}", value=known[0])


def _field(run: Run, field: str, over: str | None) -> object:
    """Return a field of a run, or its ratio to another. Times of a resumed run are unknown: they cover only a part."""
    value = metrics.value(run.record, field)
    if over is None:
        return value
    divisor = metrics.value(run.record, over)
    return value / divisor if is_number(value) and is_number(divisor) and divisor else None


def _middle_of(chosen: Chosen, about: str, numbers: list[float]) -> Finding:
    """Return the median of some runs, with the range of what was measured."""
    span = (min(numbers), max(numbers))
    return chosen.finding(about + span_words(*span), value=stats.median(numbers), interval=span)


@over_records
def ran(evidence: Evidence, claim: Claimed, *, where: Table, refused: bool = False) -> Finding:
    """Return how runs ended.

    Runs whose weights have no values are left out: they need no memory, so they always succeed.
    With `refused`, a refusal by a library is an answer as well.
    """
    statuses = (*ANSWERS, REFUSED) if refused else ANSWERS
    chosen = counting(evidence, claim, WITH_VALUES | where, statuses=statuses)
    ends = sorted({run.status for run in chosen.runs})
    working = f"{number_of(len(chosen.runs), 'runs')} ended: {', '.join(ends)}"
    if len(ends) > 1:
        return chosen.finding(working, missing="runs that end alike")
    return chosen.finding(working, value=ends[0])


# --- two sides -----------------------------------------------------------------------------------------------------


@over_records
def ratio(
    evidence: Evidence, claim: Claimed, *, quantity: str, of: Table, to: Table, where: Side = None, saved: bool = False
) -> Finding:
    """Return a quantity in some runs over the same in others, cell by equal cell; or the share saved."""
    result = compared(evidence, claim, quantity, of, to, where)
    what = f"{quantity} with {in_words(of)} over that with {in_words(to)}"
    if saved:
        result = replace(result, value=1 - result.value, low=1 - result.high, high=1 - result.low)
        what = f"saved of {what}"
    return _of_ratio(claim, result, what)


def _of_ratio(claim: Claimed, result: Ratio, what: str) -> Finding:
    span = (result.low, result.high)
    return resting_on(claim, result.runs, f"{what}: {span_words(*span, result.value)}", result.value, interval=span)


@over_records
def order(
    evidence: Evidence, claim: Claimed, *, quantity: str, arms: list[str], where: Side = None, within: float = 0
) -> Finding:
    """Return whether arms are in this order, from the best to the worst; undecided if intervals overlap.

    Arms that differ by no more than `within` count as in order.
    """
    if len(arms) < 2:
        raise Stop(f"an order needs at least two arms (got {len(arms)})", "give arms = [best, ..., worst]")
    pairs = [*itertools.pairwise(arms)]
    ratios = [compared(evidence, claim, quantity, {"arm": best}, {"arm": worst}, where) for best, worst in pairs]
    spans = [(each.low, each.high) for each in ratios]
    if quantity not in metrics.HIGHER_IS_BETTER:
        spans = [(1 / high, 1 / low) for low, high in spans]
    value = all_of(decided(low >= 1 - within, high < 1 - within) for low, high in spans)
    words = "; ".join(
        f"arm {best} over arm {worst}: {span_words(each.low, each.high, each.value)}"
        for (best, worst), each in zip(pairs, ratios, strict=True)
    )
    runs = [run for each in ratios for run in each.runs]
    return resting_on(claim, runs, f"{quantity}, {words}", value, missing=UNDECIDED if value is None else "")


Unit = Literal["volume", "tensors", "calls"]


@dataclass(frozen=True)
class Moved:
    """Which amount of which collectives is counted."""

    kinds: list[str] | None  # None: all
    unit: Unit
    node_ranks: int | None
    per_weight: bool

    def amounts(self, runs: tuple[Run, ...]) -> list[float]:
        sizes = [metrics.moved(run.record, self.kinds, self.unit, self.node_ranks) for run in runs]
        weights = [metrics.weight_bytes(run.record) if self.per_weight else 1 for run in runs]
        return [size / each for size, each in zip(sizes, weights, strict=True) if size is not None and each]

    def __str__(self) -> str:
        kinds = "all collectives" if self.kinds is None else ", ".join(self.kinds)
        over = " over the bytes of all weights" if self.per_weight else ""
        between = f" between nodes of {self.node_ranks} ranks" if self.node_ranks else ""
        return f"{self.unit} of {kinds}{over}{between}"


@over_records
def counted(
    evidence: Evidence,
    claim: Claimed,
    *,
    where: Table,
    collective: str | list[str] = "all",
    per: Literal["parameters", "step"] = "step",
    over: Side = None,
    unit: Unit = "volume",
    node_ranks: int | None = None,
) -> Finding:
    """Return what collectives moved in a step: for each byte of weights, or over the equal cell of the other side.

    With `node_ranks`, that many ranks stand for a node, and only exchanges between nodes count. A single rank sends
    nothing, so such runs count only if `where` names the ranks.
    """
    if "ranks" not in where:
        evidence = replace(evidence, runs=tuple(run for run in evidence.runs if run.ranks != 1))
    kinds = None if collective == "all" else as_list(collective)
    moved = Moved(kinds, unit, node_ranks, per == "parameters" and over is None)
    if over is not None:
        return _counted_over(evidence, claim, moved, where, over)
    chosen = counting(evidence, claim, where)
    sizes = moved.amounts(chosen.runs)
    return (
        _middle_of(chosen, f"{moved}, in {number_of(len(sizes), 'runs')}: ", sizes)
        if sizes
        else _not_counted(chosen, moved)
    )


def _counted_over(evidence: Evidence, claim: Claimed, moved: Moved, where: Table, over: Table) -> Finding:
    sides = two_sides(evidence, claim, {}, over, where, relative=False)
    amounts = [(moved.amounts(pair.of), moved.amounts(pair.to), pair) for pair in sides.pairs]
    ratios = [of_sizes(*each) for each in amounts if each[0] and each[1] and 0 not in each[1]]
    if not ratios:
        return _not_counted(sides.chosen, moved)
    return _of_ratio(claim, united(ratios), f"{moved} over that with {in_words(over)}")


def _not_counted(chosen: Chosen, moved: Moved) -> Finding:
    return chosen.finding(f"{moved} is not in the records", missing="runs with instruments")


@over_records
def equal(
    evidence: Evidence, claim: Claimed, *, field: str, of: Table, to: Table, where: Side = None, within: float = 0
) -> Finding:
    """Return whether runs of two sides have the same value in a field, cell by equal cell and seed by seed.

    Numbers may differ by the share `within` of the second side's number.
    """
    metrics.refuse_unknown(field)
    fit_for(claim, field)
    sides = two_sides(evidence, claim, of, to, where, relative=True)
    answers = [_equal_in(pair, field, within) for pair in sides.pairs]
    runs = [run for pair in sides.pairs for run in pair.of + pair.to]
    value = all_of(answers)
    closely = f", within {within:g} of it" if within else ""
    cells = f"in {answers.count(True)} cells of {len(answers)}"
    working = f"{field} with {in_words(of)} is that with {in_words(to)}{closely} {cells}"
    return resting_on(claim, runs, working, value, missing=f"records with {field}" if value is None else "")


def _equal_in(pair: Pair, field: str, within: float) -> bool | None:
    """Return whether all runs of a seed agree with one of them: each with each would take minutes for hundreds."""
    ours, theirs = (by_seed(runs, lambda run: metrics.value(run.record, field)) for runs in (pair.of, pair.to))
    seeds = ours.keys() & theirs.keys()
    if not seeds:
        return None
    return all(_alike(value, theirs[seed][0], within) for seed in seeds for value in (*ours[seed], *theirs[seed]))


def _alike(ours: object, theirs: object, within: float) -> bool:
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(_alike(a, b, within) for a, b in zip(ours, theirs, strict=True))
    if is_number(ours) and is_number(theirs):
        return abs(ours - theirs) <= within * abs(theirs)
    return ours == theirs


# --- losses --------------------------------------------------------------------------------------------------------


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
    curve: losses.Curve = "eval",
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
        cells = [
            (losses.of_seeds(pair.of, curve, first), losses.of_seeds(pair.to, curve, second), pair)
            for pair in sides.pairs
        ]
        enough = [cell for cell in cells if min(len(cell[0]), len(cell[1])) >= stats.FEWEST_RUNS]
        for our_losses, their_losses, pair in enough or cells:  # too few seeds matter only if no cell has enough
            answer, working = losses.compare(our_losses, their_losses, margin, direction)
            answers.append(answer)
            words.append(f"{curve} loss with {in_words(ours)} against {in_words(theirs)}: {working}")
            runs += pair.of + pair.to
    value = all_of(answers)
    missing = "more seeds: see the working" if value is None else ""
    return resting_on(claim, runs, "; ".join(words), value, missing=missing)


def _compared_sides(arms: list[str] | None, ours: Side, theirs: Side) -> list[tuple[Table, Table]]:
    if arms is None and ours is not None and theirs is not None:
        return [(ours, theirs)]
    if arms is None or ours is not None or theirs is not None:
        raise Stop("same_loss needs either arms, or of and to", "give one of the two")
    return [({"arm": arm}, {"arm": arms[0]}) for arm in arms[1:]]


def unit_of(name: str, arguments: dict) -> str | None:
    """Return the unit of what a check over records finds."""
    if name == "counted":
        is_ratio = arguments.get("per") == "parameters" or arguments.get("over")
        return "number" if is_ratio or arguments.get("unit") == "calls" else "bytes"
    if name == "observed":
        return None if arguments.get("over") else metrics.unit_of(str(arguments.get("field")))
    return "number"
