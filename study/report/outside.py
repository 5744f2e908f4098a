"""How far predictions are from published measurements, as tables and sentences."""

from collections.abc import Iterable
from statistics import median
from typing import get_args

from study.bench import first_scores
from study.bench.published_errors import Error, Kind, accuracies, grouped, summary, table
from study.io.numbers import percent, signed
from study.predictor.outside import stored
from study.predictor.outside.published import Quantity, Role, sources
from study.predictor.outside.trainings import FLAT, ComparedRow
from study.predictor.setup import Setup


def lines(members: Iterable[ComparedRow]) -> list[dict]:
    """Return the errors of each source, of each role, and of all rows."""
    errors = table(members)
    groups = grouped(errors, lambda each: each.row.source)
    groups |= {f"all of role {role}": [each for each in errors if each.row.role == role] for role in get_args(Role)}
    error_lines = []
    for name, group in (groups | {"all": errors}).items():
        for quantity in get_args(Quantity):
            if mine := [each for each in group if each.compared.quantity == quantity]:
                own_error = sources()[name].own_error.get(quantity) if name in sources() else None
                error_lines.append({"source": name, "quantity": quantity} | _line(mine, own_error))
    return error_lines


def _line(errors: list[Error], own_error: float | None) -> dict:
    numbers = [each.compared for each in errors]
    complete = [each.compared.off for each in errors if each.member.complete]
    flat = [abs(each.others[FLAT] / each.measured - 1) for each in numbers if FLAT in each.others]
    return summary(numbers) | {
        "complete rows": len(complete) or None,
        "off by (complete)": percent(median(complete)) if complete else None,
        "within 10 % (complete)": _counted(complete, 0.1),
        "within 30 % (complete)": _counted(complete, 0.3),
        FLAT: percent(median(flat)) if flat else None,
        "its simulator": None if own_error is None else percent(own_error),
    }


def _counted(off: list[float], limit: float) -> str | None:
    return f"{sum(each <= limit for each in off)} of {len(off)}" if off else None


def misses(members: Iterable[ComparedRow]) -> list[dict]:
    """Return the predictions that missed, with their explanations. Rows that only differ in their batch are one."""

    def alike(each: Error) -> tuple:
        row = each.row
        about = (row.source, each.compared.quantity, row.model, f"{row.n_gpus} x {row.gpu}", row.arm)
        return (*about, "yes" if each.member.complete else "no", each.member.why_off(each.compared) or "not explained")

    miss_lines = []
    names = ("source", "quantity", "model", "on", "arm", "complete", "why")
    for key, mine in grouped((each for each in table(members) if each.compared.missed), alike).items():
        off = [each.compared.error for each in mine]
        ends = dict.fromkeys((signed(min(off)), signed(max(off))))
        *about, why = zip(names, key, strict=True)
        miss_lines.append(dict(about) | {"rows": len(mine), "off by": " to ".join(ends)} | dict([why]))
    return miss_lines


def accuracy() -> str:
    """Return in a sentence how accurate the predictions of others' measurements are."""
    parts = [
        f"{quantity} is {percent(each['median_error'])} off over {each['rows']} rows of {each['sources']} sources "
        f"({percent(each['too_low'])} of rows over 10% too low)"
        for quantity, each in stored.read()["accuracy"].items()
    ]
    inside = percent(stored.read()["accuracy"]["time"]["inside"])
    text = f"Compared with what others measured, each source with the same weight: {'; '.join(parts)}"
    text += f"; the interval of the time holds {inside} of the rows that did not decide it"
    return f"{text} (study outside --against ours). {first_score()}"


def first_score() -> str:
    """Return in a sentence how far off the predictions were of the newest sources, before anybody had seen an error."""
    parts = []
    for quantity in get_args(Quantity):
        each = first_scores.latest(quantity)
        parts.append(
            f"{quantity} was {percent(each.median_error)} off over {each.rows} rows, {percent(each.near)} within "
            f"{percent(first_scores.NEAR[quantity])}, and {percent(each.refused)} were refused"
        )
    inside = first_scores.latest("time").inside
    if inside is not None:
        parts.append(f"the interval held {percent(inside)} of the times, each source with the same weight")
    return f"Of the newest sources, scored once: {'; '.join(parts)}."


def accuracy_of(setup: Setup, local: int) -> str:
    """Return in a sentence how far off predictions of this kind of training are, each source with the same weight."""
    kind = Kind.of_setup(setup, local)
    known = accuracies(each for each in stored.predictions() if Kind.of_row(each.row) == kind)
    parts = [
        f"{name} is {percent(each['median_error'])} off (rows: {each['rows']}, sources: {each['sources']}, "
        f"over 10% too low: {each['too_low']:.0%})"
        if (each := known.get(name))
        else f"{name}: no published row of this kind"
        for name in get_args(Quantity)
    ]
    return f"Of this kind alone ({', '.join(kind)}): {'; '.join(parts)}."
