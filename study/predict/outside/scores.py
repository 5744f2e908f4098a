"""How far predictions are from what others measured: `python -m study.predict.outside.scores mine.csv`."""

import csv
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from math import ceil
from multiprocessing import get_context
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median
from typing import Literal

import tyro
from pydantic import BaseModel, ValidationError

from study.core.errors import Stop, exit_on_stop
from study.core.files import sentence, why
from study.core.options import parsed
from study.core.text import percent, show
from study.predict.outside import predicting, published
from study.predict.outside.predicting import Predicted
from study.predict.outside.published import FOLDER, Measured, Quantity, Row

FILE = FOLDER / "predictions.csv"
NEAR = {"memory": 0.1, "time": 0.35}  # shares; memory: what an advice leaves free
TOO_LOW = 0.1  # a peak that is predicted lower than this ends in a lack of memory
MOST_OF_A_SOURCE = 12
ROWS_AT_ONCE = 10  # of a process: neighbours are often of one model, and share its traces


class Number(BaseModel, frozen=True):
    """A published number, and what was predicted of it: bytes, or seconds of a step. None: refused."""

    key: str  # of the row
    set: str
    source: str
    quantity: Quantity
    measured: float
    ours: Measured = None
    low: Measured = None
    high: Measured = None
    limit: Literal["gpu", "host", "links"] | None = None  # what decides the step, as it is predicted now
    first: Measured = None  # ours before anybody had seen an error on the row's set


@functools.cache
def numbers() -> tuple[Number, ...]:
    return tuple(published.read(FILE, Number))


def score(mine: Sequence[Number], column: str = "ours") -> dict:
    """The figures of a prediction of some numbers of one quantity, as shares. What is refused has no error."""
    off = [predicted / each.measured - 1 for each in mine if (predicted := getattr(each, column))]
    figures = {"numbers": len(mine), "refused": 1 - len(off) / len(mine)}
    if off:
        figures["median error"] = median(map(abs, off))
        figures["near"] = fmean(abs(each) <= NEAR[mine[0].quantity] for each in off)
        figures["too low"] = fmean(each < -TOO_LOW for each in off)
    return figures


def capped(mine: Sequence[Number]) -> list[Number]:
    """At most so many numbers of each source, in equal steps: a source has one machine and one way to measure."""
    by_source = defaultdict(list)
    for each in mine:
        by_source[each.source].append(each)
    return [each for group in by_source.values() for each in group[:: ceil(len(group) / MOST_OF_A_SOURCE)]]


def lines_of(mine: Sequence[Number], name_of: Callable[[Number], str]) -> list[dict]:
    """The figures of each group of numbers that have a name and a quantity in common."""
    groups = defaultdict(list)
    for each in mine:
        groups[each.quantity, name_of(each)].append(each)
    lines = []
    for (quantity, name), group in sorted(groups.items()):
        first = score(group, "first")
        line: dict = {"quantity": quantity, "of": name} | score(group) | {"in interval": None}
        if inside := [each.low <= each.measured <= each.high for each in group if each.low and each.high]:
            line["in interval"] = fmean(inside)
        lines.append(line | {f"first {name}": first.get(name) for name in ("median error", "near")})
    return lines


def predict(rows: Sequence[Row]) -> list[Number]:
    """A number for each that a row measured."""
    # Fresh processes, because one that is forked beside torch's threads may hang.
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        predicted = [*pool.map(predicting.of_row, rows, chunksize=ROWS_AT_ONCE)]
    lines = []
    for row, values in zip(rows, predicted, strict=True):
        for quantity, measured in row.measured.items():
            number = Number(
                key=row.key,
                set=row.set,
                source=row.source,
                quantity=quantity,
                measured=measured,
                **asdict(values.get(quantity, Predicted())),
            )
            lines.append(number)
    return lines


def rows_of(file: Path) -> list[Row]:
    try:
        return published.read(file, Row)
    except ValidationError as error:
        raise Stop(f"{file}: {sentence(error)}", "its columns are those of reports/outside/README.md") from None
    except (OSError, ValueError, csv.Error) as error:
        raise Stop(f"{file} cannot be read ({why(error)})", "give a CSV file") from None


def main(file: tyro.conf.Positional[Path], /) -> None:
    """Show how far predictions are from measurements of your own.

    Args:
        file: A CSV file in the columns of reports/outside/README.md.
    """
    show_lines(lines_of(predict(rows_of(file)), attrgetter("source")))


def show_lines(lines: list[dict]) -> None:
    show([{name: percent(each) if isinstance(each, float) else each for name, each in line.items()} for line in lines])


if __name__ == "__main__":
    with exit_on_stop():
        parsed(main, prog="python -m study.predict.outside.scores")
