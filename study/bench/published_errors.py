"""Errors of the predictions of published rows: by row, by source, and over all sources."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import mean, median
from typing import NamedTuple, TypeVar, get_args

from study.io.numbers import percent, signed
from study.predictor.outside import published, stored
from study.predictor.outside.published import Quantity, Row
from study.predictor.outside.trainings import Compared, ComparedRow, compare_all

TOO_LOW = 0.1  # what is predicted lower than this ends in a lack of memory
Key = TypeVar("Key")


class Error(NamedTuple):
    """A number that is predicted and measured, and its row."""

    member: ComparedRow
    compared: Compared

    @property
    def row(self) -> Row:
        return self.member.row


def table(members: Iterable[ComparedRow]) -> list[Error]:
    """Return all numbers that are predicted and measured."""
    return [Error(member, compared) for member in members for compared in member.quantities]


def grouped(errors: Iterable[Error], key: Callable[[Error], Key]) -> dict[Key, list[Error]]:
    """Return the errors by a key, in the order in which the keys come first."""
    groups: dict[Key, list[Error]] = defaultdict(list)
    for each in errors:
        groups[key(each)].append(each)
    return dict(groups)


def summary(numbers: Sequence[Compared]) -> dict:
    """Return the errors of some numbers in words."""
    off = [each.off for each in numbers]
    inside = [each.inside for each in numbers if each.inside is not None]
    return {
        "rows": len(numbers),
        "median": signed(median(each.error for each in numbers)),
        "off by": percent(median(off)),
        "worst": signed(max((each.error for each in numbers), key=abs)),
        "within 10 %": percent(mean(each <= 0.1 for each in off)),
        "within 30 %": percent(mean(each <= 0.3 for each in off)),
        "in interval": percent(mean(inside)) if inside else None,
    }


def accuracies(members: Iterable[ComparedRow]) -> dict[str, dict]:
    """Return how far off predictions are of rows that no constant was fitted to. Each source weighs the same.

    `too_low`: the share of rows that are predicted more than 10 % too low. `inside`: the share of rows inside the
    interval, of sources that did not decide its width.
    """
    errors = [each for each in table(members) if each.compared.quantity == "memory" or each.row.role != "fit"]
    groups = grouped(errors, lambda each: each.compared.quantity)
    return {quantity: _accuracy(groups[quantity]) for quantity in get_args(Quantity) if quantity in groups}


def _accuracy(errors: list[Error]) -> dict:
    by_source = grouped(errors, lambda each: each.row.source).values()
    tested = [each for each in errors if each.row.role == "test" and each.compared.inside is not None]
    inside = grouped(tested, lambda each: each.row.source).values()
    return {
        "rows": len(errors),
        "sources": len(by_source),
        "median_error": median(median(each.compared.off for each in mine) for mine in by_source),
        "too_low": mean(mean(each.compared.error < -TOO_LOW for each in mine) for mine in by_source),
        "inside": mean(mean(bool(each.compared.inside) for each in mine) for mine in inside) if inside else None,
    }


def write() -> None:
    """Predict all own rows again, and write the file: a line for each row, and the accuracy."""
    members = compare_all(published.rows())
    kept = [{name: member.as_json()[name] for name in ("key", "reason", "quantities")} for member in members]
    rows = ",\n".join(map(json.dumps, kept))
    accuracy = json.dumps(accuracies(members), indent=1)
    stored.PREDICTIONS.write_text(f'{{"rows": [\n{rows}\n],\n"accuracy": {accuracy}}}\n')
