"""Two sides of a claim over records: the runs that count on each, paired; and the finding that rests on them."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from study.errors import Stop
from study.io.numbers import number_of
from study.ledger.arguments import as_list
from study.ledger.choosing import Chosen, Claimed, choose
from study.ledger.verdict import NOT_TESTED, Finding
from study.records import metrics
from study.records.evidence import Evidence
from study.records.facts import UNKNOWN
from study.records.pairs import Pair, Ratio, paired, ratio, united
from study.records.runs import Run

Table = dict
Side = dict | None
TRAINING = "training"  # in `of` and `to`: which of the published script's trainings


@dataclass(frozen=True)
class Sides:
    """Two sides that both have runs, paired by equal cell."""

    chosen: Chosen  # of the first side
    pairs: list[Pair]
    refused: list[str]  # why other cells make no pairs
    training: tuple[int | None, int | None]  # of the published script


class Undecided(Exception):
    """No runs decide a claim. The finding says why, and what would."""

    def __init__(self, finding: Finding):
        super().__init__(finding.working)
        self.finding = finding


def over_records(check: Callable[..., Finding]) -> Callable[..., Finding]:
    """Make a check return the finding of why it is undecided."""

    @functools.wraps(check)
    def with_reason(*about, **given) -> Finding:
        try:
            return check(*about, **given)
        except Undecided as undecided:
            return undecided.finding

    return with_reason


def counting(evidence: Evidence, claim: Claimed, where: Table, relative: bool = False, **how) -> Chosen:
    """Return the runs that count for a claim. Raise Undecided if there is none."""
    chosen = choose(evidence, claim, where, relative, **how)
    if chosen.runs:
        return chosen
    working = f"no run has {in_words(where)}"
    if chosen.others:
        working = f"{number_of(len(chosen.others), 'runs')} of this kind, but none in the claim's conditions"
    raise Undecided(chosen.finding(working, without=NOT_TESTED, missing="runs in the claim's conditions"))


def two_sides(evidence: Evidence, claim: Claimed, ours: Table, theirs: Table, where: Side, relative: bool) -> Sides:
    """Return both sides. Raise Undecided if they are not comparable."""
    chosen = []
    for side in (ours, theirs):
        wanted = (where or {}) | {name: value for name, value in side.items() if name != TRAINING}
        chosen.append(counting(evidence, claim, wanted, relative))
    pairs, refused = paired(chosen[0].runs, chosen[1].runs, {*ours, *theirs} - {TRAINING})
    if not pairs:
        raise _unlike_cells(chosen[0], refused)
    return Sides(chosen[0], pairs, refused, (ours.get(TRAINING), theirs.get(TRAINING)))


def compared(evidence: Evidence, claim: Claimed, quantity: str, ours: Table, theirs: Table, where: Side) -> Ratio:
    """Return the ratio of a quantity on two sides, over all cells that both ran. Raise Undecided if there is none."""
    fit_for(claim, quantity)
    metrics.value(UNKNOWN, quantity, ours.get(TRAINING))  # refuses a name that no record has
    relative = quantity.startswith(metrics.COMPONENT) or quantity == "states_bytes"
    sides = two_sides(evidence, claim, ours, theirs, where, relative)
    ratios = [ratio(pair, quantity, sides.training) for pair in sides.pairs]
    known = [each for each in ratios if isinstance(each, Ratio)]
    if not known:
        raise _unlike_cells(sides.chosen, [*sides.refused, *map(str, ratios)])
    return united(known)


def _unlike_cells(chosen: Chosen, reasons: list[str]) -> Undecided:
    working = "; ".join(dict.fromkeys(reasons)) or "no cell was run on both sides"
    return Undecided(chosen.finding(working, missing=f"runs that differ only in what is compared ({working})"))


def resting_on(claim: Claimed, runs: Iterable[Run], working: str, value: object, **about) -> Finding:
    """Return a finding with its runs, and in which of the claim's conditions they differ."""
    unique = tuple(dict.fromkeys(runs))
    differs = choose(Evidence(unique), claim, {}, relative=True).differs
    return Chosen(unique, (), differs).finding(f"{working}, {number_of(len(unique), 'runs')}", value=value, **about)


def fit_for(claim: Claimed, quantity: str) -> None:
    """Refuse times and losses for claims of another kind, because other kinds accept evidence from other machines."""
    sort = metrics.sort_of(quantity)
    if sort and claim.kind != sort:
        raise Stop(f"{quantity} is of kind {sort}, but the claim is of kind {claim.kind}", f"write kind = {sort!r}")


def in_words(table: Table) -> str:
    return " ".join(f"{name} {' or '.join(map(str, as_list(value)))}" for name, value in table.items())


def span_words(low: float, high: float, middle: float | None = None) -> str:
    if low == high:
        return f"{low:.4g}"
    span = f"{low:.4g} to {high:.4g}"
    return span if middle is None else f"{middle:.4g} ({span})"
