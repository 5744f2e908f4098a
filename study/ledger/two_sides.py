"""Two sides of runs that a check compares, cell by equal cell; and findings that rest on runs."""

from collections.abc import Iterable
from typing import NamedTuple

from study.errors import Stop
from study.ledger import pairing
from study.ledger.arguments import as_list
from study.ledger.evidence import UNKNOWN, Chosen, Evidence, choose
from study.ledger.model import Claim
from study.ledger.verdict import NOT_TESTED, Finding
from study.records import metrics
from study.records.runs import Run

Table, Side = dict, dict | None
TRAINING = "training"  # in `of` and `to`: which of the published script's trainings


def not_tested(chosen: Chosen, where: Table) -> Finding:
    elsewhere = f"{len(chosen.others)} runs match, but none in the claim's conditions"
    working = elsewhere if chosen.others else f"no run has {in_words(where)}"
    return chosen.finding(working, without=NOT_TESTED, missing="runs in the claim's conditions")


def resting_on(claim: Claim, runs: Iterable[Run], working: str, **about) -> Finding:
    """A finding with its runs, and in which of the claim's conditions they differ."""
    runs = tuple(dict.fromkeys(runs))
    differs = choose(Evidence(runs), claim, {}, relative=True).differs
    return Chosen(runs, (), differs).finding(f"{working}, {len(runs)} runs", **about)


def fit_for(claim: Claim, quantity: str) -> None:
    """Refuse times and losses for claims of another kind, because other kinds accept evidence from other machines."""
    sort = metrics.sort_of(quantity)
    if sort and claim.kind != sort:
        raise Stop(f"{quantity} is of kind {sort}, but the claim is of kind {claim.kind}", f"write kind = {sort!r}")


class Sides(NamedTuple):
    """Two sides that both have runs, paired by equal cell."""

    chosen: Chosen  # of the first side
    pairs: list[pairing.Pair]
    refused: list[str]  # why other cells make no pairs
    training: tuple[int | None, int | None]  # of the published script


def two_sides(evidence: Evidence, claim: Claim, of: Table, to: Table, where: Side, relative: bool) -> Sides | Finding:
    """Both sides, or a finding that says why they are not comparable."""
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
    """The ratio of a quantity on two sides, over all cells that both ran; or a finding that says why there is none."""
    fit_for(claim, quantity)
    metrics.value(UNKNOWN, quantity, of.get(TRAINING))  # refuses a name that no record has
    relative = quantity.startswith(metrics.COMPONENT) or quantity == "states_bytes"
    sides = two_sides(evidence, claim, of, to, where, relative)
    if isinstance(sides, Finding):
        return sides
    ratios = [pairing.ratio(pair, quantity, sides.training) for pair in sides.pairs]
    if known := [ratio for ratio in ratios if isinstance(ratio, pairing.Ratio)]:
        return pairing.united(known)
    return unlike_cells(sides.chosen, [*sides.refused, *ratios])


def decided(yes: bool, no: bool) -> bool | None:
    return True if yes else False if no else None


def all_of(answers: list[bool | None]) -> bool | None:
    """Whether all answers are yes: no if any is no, else undecided if any is undecided."""
    return False if False in answers else None if None in answers else True


def in_words(table: Table) -> str:
    return " ".join(f"{name} {' or '.join(map(str, as_list(value)))}" for name, value in table.items())


def span_words(low: float, high: float, middle: float | None = None) -> str:
    if low == high:
        return f"{low:.4g}"
    return f"{low:.4g} to {high:.4g}" if middle is None else f"{middle:.4g} ({low:.4g} to {high:.4g})"
