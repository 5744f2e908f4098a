"""How far predictions are from what others measured: `python -m study.predict.outside.scores mine.csv`."""

import csv
import functools
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from math import ceil
from multiprocessing import get_context, parent_process
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median
from threading import Thread
from typing import Any, Literal

import tyro
from pydantic import BaseModel, ValidationError

from study.core.errors import Stop, exit_on_stop, nearest
from study.core.files import sentence, why
from study.core.options import parsed
from study.core.text import percent, rounded, say, show, size
from study.predict.outside import predicting, published
from study.predict.outside.predicting import Predicted
from study.predict.outside.published import FOLDER, Measured, PublishedRow, Quantity, Text

FILE = FOLDER / "predictions.csv"
NEAR = {"memory": 0.1, "time": 0.35}  # shares; memory: what an advice leaves free
TOO_LOW = 0.1  # a peak that is predicted lower than this ends in a lack of memory
MOST_OF_A_SOURCE = 12
COLUMNS = "its columns are those of reports/outside/README.md"
# In the source's words: config, gpu_name, deepspeed, fsdp, dtype and checkpointing count.
AS_THE_SOURCE = ("model", "gpu", "arm", "precision", "activation_checkpointing")
MOST_LINES = 10_000  # of a user's file
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
    why: Text = None  # it is refused. Not stored
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


def capped(mine: Sequence[Any]) -> list[Any]:
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


def predict(rows: Iterable[PublishedRow], at_once: int = ROWS_AT_ONCE) -> Iterator[list[Number]]:
    """For each row a number for each that it measured, as soon as they are predicted. What was predicted is kept."""
    # Fresh processes, because one that is forked beside torch's threads may hang.
    rows = [*rows]
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=_end_with_parent) as pool:
        for row, values in zip(rows, pool.map(predicting.once, rows, chunksize=at_once), strict=True):
            yield [number(row, quantity, each) for quantity, each in values.items()]


def _end_with_parent() -> None:
    """End this process with the one that started it. A pool's processes outlive one that is killed."""

    def wait() -> None:
        if parent := parent_process():
            parent.join()
            os._exit(1)

    Thread(target=wait, daemon=True).start()


def number(row: PublishedRow, quantity: Quantity, predicted: Predicted) -> Number:
    measured, answer = row.measured[quantity], asdict(predicted)
    return Number(key=row.key, set=row.set, source=row.source, quantity=quantity, measured=measured, **answer)


# --- a file of a user's own -----------------------------------------------------------------------------------------


def rows_of(file: Path) -> dict[int, PublishedRow]:
    """The rows of a file, by their lines."""
    rows: dict[int, PublishedRow] = {}
    try:
        lines = published.lines(file)
        _check_columns(file, lines.fieldnames or [])
        for line in lines:
            if None in line or None in line.values():
                what = f"{file}, line {lines.line_num}: it has not as many fields as the first line"
                raise Stop(what, "put quotation marks around a field with commas in it")
            rows[lines.line_num] = published.filled(PublishedRow, line)
            if len(rows) > MOST_LINES:
                raise Stop(f"{file} has more than {MOST_LINES:,} rows", "give fewer: each takes seconds")
    except ValidationError as error:
        raise Stop(f"{file}, line {lines.line_num}: {sentence(error)}", COLUMNS) from None
    except (OSError, ValueError, csv.Error) as error:
        raise Stop(f"{file} cannot be read ({why(error)})", "give a CSV file") from None
    if not rows:
        raise Stop(f"{file} has no rows", COLUMNS)
    return rows


def _check_columns(file: Path, names: Sequence[str]) -> None:
    known = dict.fromkeys([*PublishedRow.model_fields, *(published.lines(published.FILE).fieldnames or [])])
    if len(names) == 1 and len(re.split("[;\t]", names[0])) > 1:
        raise Stop(f"{file}: its fields are divided by semicolons or tabs", "write it with commas, and 1.5 for 1,5")
    for name in names:
        if name not in known:
            remedy = nearest(name, known, most=3, otherwise=COLUMNS)
            raise Stop(f"{file}: there is no column {name!r:.80}", remedy)
        if names.count(name) > 1:
            raise Stop(f"{file}: there are several columns {name}", "leave one of them")
    if unread := [name for name in names if name not in PublishedRow.model_fields or name in AS_THE_SOURCE]:
        sys.stderr.write(f"columns that change no prediction: {', '.join(unread)}\n")


def in_words(row: PublishedRow, mine: Sequence[Number]) -> str:
    """What was measured of a row, and what is predicted of it, or why nothing is."""
    parts = []
    for each in mine:
        if each.ours is None:
            parts.append(f"{each.quantity} refused ({each.why})")
            continue
        measured, ours = size(each.measured), size(each.ours)
        if each.quantity == "time":
            measured, ours = (f"{rounded(seconds, '.3g')} s" for seconds in (each.measured, each.ours))
        parts.append(f"{each.quantity} {measured} measured, {ours} predicted")
    if row.tokens_per_s_per_gpu and not row.step_s:
        parts.append("time unknown (tokens_per_s_per_gpu needs seq and micro_batch, or seq_mean, and no parallel)")
    return "; ".join(parts) or "nothing measured (memory_GB, step_time_s and tokens_per_s_per_gpu are empty)"


def main(file: tyro.conf.Positional[Path], /) -> None:
    """Show how far predictions are from measurements of your own.

    Args:
        file: A CSV file in the columns of reports/outside/README.md.
    """
    rows = rows_of(file)
    numbers = []
    for (line, row), mine in zip(rows.items(), predict(rows.values(), at_once=1), strict=True):
        say(f"line {line}: {in_words(row, mine)}")
        numbers += mine
    say("")
    show_lines(lines_of(numbers, attrgetter("source")))


def show_lines(lines: list[dict]) -> None:
    show([{name: percent(each) if isinstance(each, float) else each for name, each in line.items()} for line in lines])


if __name__ == "__main__":
    with exit_on_stop():
        parsed(main, prog="python -m study.predict.outside.scores")
