"""Checks over records. The claim's conditions decide which runs count."""

import itertools
from dataclasses import replace
from typing import Literal

from study.errors import Stop
from study.ledger import pairing
from study.ledger.arguments import as_list, is_number, one_argument
from study.ledger.evidence import Evidence, choose
from study.ledger.loss_checks import same_loss
from study.ledger.model import MEASURED, TRENDS, Claim, Kind
from study.ledger.two_sides import (
    Side,
    Table,
    all_of,
    compared,
    decided,
    fit_for,
    in_words,
    not_tested,
    resting_on,
    span_words,
    two_sides,
)
from study.ledger.verdict import Finding
from study.records import metrics, stats
from study.records.runs import Run

ANSWERS = ("done", "oom", "host_oom", "diverged")  # any other failure says nothing about the claim
REFUSED = "unavailable"  # by a library


def observed(evidence: Evidence, claim: Claim, *, field: str, where: Table, over: str | None = None) -> Finding:
    """The value of a field, or its ratio to another field: a number with its range, or what all records agree on."""
    for path in filter(None, (field, over)):
        metrics.refuse_unknown(path)
    if over is None:  # a ratio within a run does not depend on the machine
        fit_for(claim, field)
    chosen = choose(evidence, claim, where, relative=over is not None)
    if not chosen.runs:
        return not_tested(chosen, where)
    values = [metrics.value(run.record, field) for run in chosen.runs]
    if over:
        divisors = [metrics.value(run.record, over) for run in chosen.runs]
        values = [a / b if is_number(a) and is_number(b) and b else None for a, b in zip(values, divisors, strict=True)]
    known = [value for value in values if value is not None]
    name = f"{field} / {over}" if over else field
    about = f"{name} in {len(known)} runs: "
    if not known:
        return chosen.finding(f"{name} is not in the records", missing=f"records with {name}")
    if all(map(is_number, known)):
        if metrics.sort_of(field) and len(known) < stats.FEWEST_RUNS:
            return chosen.finding(f"{about}{known}", missing=f"{stats.FEWEST_RUNS} runs")
        span = min(known), max(known)
        return chosen.finding(about + span_words(*span), value=stats.median(known), interval=span)
    if any(value != known[0] for value in known):
        unlike = ", ".join(sorted(set(map(str, known))))
        return chosen.finding(f"{about}they disagree ({unlike})", missing="records that agree")
    return chosen.finding(f"{about}{known[0]}", value=known[0])


def ran(evidence: Evidence, claim: Claim, *, where: Table, refused: bool = False) -> Finding:
    """How runs ended. Runs whose weights have no values are left out: they need no memory, so they always succeed.

    With `refused`, a refusal by a library is an answer as well.
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


def ratio(
    evidence: Evidence, claim: Claim, *, quantity: str, of: Table, to: Table, where: Side = None, saved: bool = False
) -> Finding:
    """A quantity in some runs over the same in others, cell by equal cell, with its interval; or the share saved."""
    result = compared(evidence, claim, quantity, of, to, where)
    if isinstance(result, Finding):
        return result
    value, low, high = result.value, result.low, result.high
    what = f"{quantity} with {in_words(of)} over that with {in_words(to)}"
    if saved:
        value, low, high, what = 1 - value, 1 - high, 1 - low, f"saved of {what}"
    return resting_on(claim, result.runs, f"{what}: {span_words(low, high, value)}", value=value, interval=(low, high))


def order(
    evidence: Evidence, claim: Claim, *, quantity: str, arms: list[str], where: Side = None, within: float = 0
) -> Finding:
    """Whether arms are in this order, from the best to the worst: yes, no, or undecided because intervals overlap.

    Arms that differ by no more than `within` count as in order.
    """
    if len(arms) < 2:
        raise Stop(f"an order needs at least two arms (got {len(arms)})", "give arms = [best, ..., worst]")
    words, answers, runs = [], [], []
    for best, worst in itertools.pairwise(arms):
        result = compared(evidence, claim, quantity, {"arm": best}, {"arm": worst}, where)
        if isinstance(result, Finding):
            return result
        runs += result.runs
        words.append(f"{best} over {worst}: {span_words(result.low, result.high, result.value)}")
        higher = quantity in metrics.HIGHER_IS_BETTER
        low, high = (result.low, result.high) if higher else (1 / result.high, 1 / result.low)
        answers.append(decided(low >= 1 - within, high < 1 - within))
    value = all_of(answers)
    missing = "more runs: an interval reaches both sides" if value is None else ""
    return resting_on(claim, runs, f"{quantity}, {'; '.join(words)}", value=value, missing=missing)


def measured_trend(
    evidence: Evidence, claim: Claim, *, quantity: str, along: dict[str, list], where: Side = None, within: float = 0
) -> Finding:
    """Whether a quantity "rises" or "falls" along the values of a fact of runs, in their order, or "neither".

    Each value is compared with the one before, in cells that differ in that fact alone. A change of at most `within`
    counts as none.
    """
    name, values = one_argument(along)
    words, rises, falls, runs = [], [], [], []
    for before, after in itertools.pairwise(values):
        result = compared(evidence, claim, quantity, {name: after}, {name: before}, where)
        if isinstance(result, Finding):
            return result
        runs += result.runs
        words.append(f"{name} {after} over {before}: {span_words(result.low, result.high, result.value)}")
        rises.append(decided(result.low > 1 + within, result.high <= 1 + within))
        falls.append(decided(result.high < 1 - within, result.low >= 1 - within))
    up, down = all_of(rises), all_of(falls)
    value = "rises" if up else "falls" if down else "neither" if up is False and down is False else None
    missing = "more runs: an interval reaches both sides" if value is None else ""
    return resting_on(claim, runs, f"{quantity}, {'; '.join(words)}", value=value, missing=missing)


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
    """What collectives moved in a step: for each byte of weights, or as a ratio to the equal cell of the other side.

    With `node_ranks`, that many ranks stand for a node, and only exchanges between nodes count. A single rank sends
    nothing, so such runs count only if `where` names the ranks.
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
            working = f"{what}, in {len(sizes)} runs: {span_words(*span)}"
            return chosen.finding(working, value=stats.median(sizes), interval=span)
    else:
        sides = two_sides(evidence, claim, {}, over, where, relative=False)
        if isinstance(sides, Finding):
            return sides
        chosen, sizes = sides.chosen, [(moved(pair.of), moved(pair.to), pair) for pair in sides.pairs]
        ratios = [pairing.of_sizes(*each) for each in sizes if each[0] and each[1] and min(each[1])]
        if ratios:
            value, low, high, runs = pairing.united(ratios)
            working = f"{what} over that with {in_words(over)}: {span_words(low, high, value)}"
            return resting_on(claim, runs, working, value=value, interval=(low, high))
    return chosen.finding(f"{what} is not in the records", missing="runs with instruments")


def equal(
    evidence: Evidence, claim: Claim, *, field: str, of: Table, to: Table, where: Side = None, within: float = 0
) -> Finding:
    """Whether runs of two sides have the same value in a field, cell by equal cell and seed by seed.

    Numbers may differ by the share `within` of the second side's number.
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
        if (value := metrics.value(run.record, field)) is not None:
            values.setdefault(run.seed, []).append(value)
    return values


def _alike(ours, theirs, within: float) -> bool:
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(_alike(a, b, within) for a, b in zip(ours, theirs, strict=True))
    if is_number(ours) and is_number(theirs):
        return abs(ours - theirs) <= within * abs(theirs)
    return ours == theirs


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
