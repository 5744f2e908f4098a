"""How far predictions are from what others measured.

python -m study.predictor.outside.scores            errors by set, and beside other predictors
python -m study.predictor.outside.scores mine.csv   predictions beside your own measurements
python -m study.predictor.outside.scores --write    predict all rows again
"""

import csv
import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
from typing import Literal

import tyro
from pydantic import BaseModel

from study.errors import exit_on_stop
from study.io.numbers import percent
from study.io.tables import say, show
from study.predictor.outside import own, published
from study.predictor.outside.predicting import of_row
from study.predictor.outside.published import FOLDER, Measured, Quantity, set_number
from study.spec.options import parsed

FILE = FOLDER / "predictions.csv"
NEAR = {"memory": 0.1, "time": 0.35}
TOO_LOW = 0.1  # a peak that is predicted lower than this ends in a lack of memory
ROWS_AT_ONCE = 10  # of a process: neighbours are often of one model, and share its traces
DIFFERENT = 0.02  # speeds that are nearer have no order
SIMULATORS = {"tohtana/phantora-seq-gap-repro": "phantora", "MooreThreads/SimuMax": "simumax"}
Rival = Literal["flat", "accelerate", "deepspeed", "phantora", "simumax"]
RIVALS: tuple[Rival, ...] = ("flat", "accelerate", "deepspeed", "phantora", "simumax")
Column = Literal["ours", "first"] | Rival


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
    first: Measured = None  # ours before anybody had seen an error on the row's set
    flat: Measured = None
    accelerate: Measured = None
    deepspeed: Measured = None
    phantora: Measured = None
    simumax: Measured = None

    def error(self, column: Column) -> float | None:
        predicted = getattr(self, column)
        return None if predicted is None else predicted / self.measured - 1


@functools.cache
def numbers(file: Path = FILE) -> tuple[Number, ...]:
    """Return all numbers with their stored predictions."""
    return tuple(published.read(file, Number))


def score(mine: Sequence[Number], column: Column = "ours") -> dict:
    """Return the figures of a predictor on some numbers of one quantity. What is refused has no error."""
    errors = [error for each in mine if (error := each.error(column)) is not None]
    off = [abs(error) for error in errors]
    return {
        "numbers": len(mine),
        "refused": 1 - len(off) / len(mine),
        "median error": median(off) if off else None,
        "near": mean(each <= NEAR[mine[0].quantity] for each in off) if off else None,
        "too low": mean(each < -TOO_LOW for each in errors) if off else None,
    }


def inside(mine: Iterable[Number]) -> float | None:
    """Return the share of numbers in our interval."""
    bounded = [each.low <= each.measured <= each.high for each in mine if each.low and each.high]
    return mean(bounded) if bounded else None


def by_set(everything: Sequence[Number]) -> list[dict]:
    """Return the figures of each set. 0: rows that the predictor met first; the last one is unseen by fits."""
    lines = []
    for quantity in NEAR:
        sets = defaultdict(list)
        for each in everything:
            if each.quantity == quantity:
                sets[set_number(each.set)].append(each)
        before = [each for number, group in sets.items() if number < max(sets) for each in group]
        for name, group in [*sorted(sets.items()), ("all before", before)]:
            first, pairs = score(group, "first"), order(group)
            line = {"quantity": quantity, "set": str(name)} | score(group) | {"in interval": inside(group)}
            line |= {"first median": first["median error"], "first near": first["near"]}
            line |= {"pairs of arms": len(pairs) or None, "in order": float(mean(pairs)) if pairs else None}
            lines.append(line)
    return lines


def order(mine: Iterable[Number]) -> list[bool]:
    """Return for each pair of arms whether its order of speed is predicted.

    A pair is two rows of one source, model, machine and row length that are sharded in different ways.
    """
    rows = {row.key: row for row in published.rows()}
    tables = defaultdict(list)
    for each in mine:
        row = rows[each.key]
        if each.quantity == "time" and each.ours and row.rows_per_s:
            table, arm = (row.source, row.model, row.gpu, row.n_gpus, row.seq), (row.deepspeed, row.fsdp, row.group)
            tables[table].append((arm, row.rows_per_s, row.rows_per_s * each.measured / each.ours))
    return [
        (speed > other_speed) == (predicted > other_predicted)
        for lines in tables.values()
        for (arm, speed, predicted), (other_arm, other_speed, other_predicted) in combinations(lines, 2)
        if arm != other_arm and abs(speed / other_speed - 1) > DIFFERENT
    ]


def rivals(everything: Iterable[Number]) -> list[dict]:
    """Return the median errors of other predictors, beside ours on the same rows."""
    lines = []
    for quantity in NEAR:
        for rival in RIVALS:
            same = [each for each in everything if each.quantity == quantity and getattr(each, rival) and each.ours]
            if same:
                medians = {"its median": score(same, rival)["median error"], "ours": score(same)["median error"]}
                lines.append({"quantity": quantity, "rival": rival, "numbers": len(same)} | medians)
    return lines


def store_predictions() -> None:
    """Predict all rows again. `first` stays as it is; a set that is new has its first predictions now."""
    old = {(each.key, each.quantity): each for each in numbers()}
    scored = {each.set for each in old.values()}
    rows = published.rows()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        predicted = [*pool.map(of_row, rows, chunksize=ROWS_AT_ONCE)]
    lines = []
    for row, (values, _) in zip(rows, predicted, strict=True):
        for quantity, measured in row.measured.items():
            new: dict = {
                "key": row.key,
                "set": row.set,
                "source": row.source,
                "quantity": quantity,
                "measured": measured,
            }
            ours = values.get(quantity)
            new |= {"ours": ours and ours.value} | {name: getattr(ours, name, None) for name in ("low", "high", "flat")}
            if row.source in SIMULATORS:
                new[SIMULATORS[row.source]] = row.simulated[quantity]
            if row.set not in scored:
                new["first"] = new["ours"]
            kept = old.get((row.key, quantity))
            lines.append(kept.model_copy(update=new) if kept else Number(**new))
    store(lines)


def store(everything: Iterable[Number]) -> None:
    """Write all numbers, with six digits."""
    numbers.cache_clear()
    with FILE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Number.model_fields)
        for each in everything:
            values = (getattr(each, name) for name in Number.model_fields)
            writer.writerow(f"{value:.6g}" if isinstance(value, (int, float)) else value for value in values)


def main(file: tyro.conf.Positional[Path | None] = None, /, *, write: bool = False) -> None:
    """Show how far predictions are from measurements that others published, or from yours.

    Args:
        file: A CSV file of your own measurements. Its columns are model, gpu, gpus, arm, tokens, rows, passes,
            recompute and precision, and what you measured: memory_gb, memory_kind and step_s.
        write: Predict all published rows again, and store the result in reports/outside/predictions.csv.
    """
    if file:
        say(own.DEFAULTS, "")
        show(own.compared(file))
        return
    if write:
        store_predictions()
    show(in_percent(by_set(numbers())))
    say("")
    show(in_percent(rivals(numbers())))


def in_percent(lines: Iterable[dict]) -> list[dict]:
    """Return lines whose shares are percentages."""
    return [{name: percent(each) if isinstance(each, float) else each for name, each in line.items()} for line in lines]


if __name__ == "__main__":
    with exit_on_stop():
        parsed(main, prog="python -m study.predictor.outside.scores")
