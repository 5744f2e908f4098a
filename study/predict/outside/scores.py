"""How far predictions are from what others measured: `python -m study.predict.outside.scores`."""

import functools
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from statistics import fmean, median

from pydantic import BaseModel

from study.core.errors import exit_on_stop
from study.core.options import parsed
from study.core.text import percent, show
from study.predict.outside import predicting, published
from study.predict.outside.predicting import Predicted
from study.predict.outside.published import FOLDER, Measured, Quantity, set_number

FILE = FOLDER / "predictions.csv"
NEAR = {"memory": 0.1, "time": 0.35}  # shares; memory: what an advice leaves free
TOO_LOW = 0.1  # a peak that is predicted lower than this ends in a lack of memory
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


def by_set() -> list[dict]:
    """The figures of each set. 0: rows that the predictor met first; the last one is unseen by fits."""
    groups = defaultdict(list)
    newest = max(set_number(each.set) for each in numbers())
    for each in numbers():
        number = set_number(each.set)
        groups[each.quantity, str(number)].append(each)
        if number < newest:
            groups[each.quantity, "all before"].append(each)
    lines = []
    for (quantity, name), group in sorted(groups.items()):
        first = score(group, "first")
        line: dict = {"quantity": quantity, "set": name} | score(group) | {"in interval": None}
        if inside := [each.low <= each.measured <= each.high for each in group if each.low and each.high]:
            line["in interval"] = fmean(inside)
        lines.append(line | {f"first {name}": first.get(name) for name in ("median error", "near")})
    return lines


def store_predictions() -> None:
    """Predict all rows again. `first` stays as it is; a set that is new has its first predictions now."""
    old = {(each.key, each.quantity): each for each in numbers()}
    scored = {each.set for each in old.values()}  # somebody may have seen an error on these sets
    rows = published.rows()
    # Fresh processes, because one that is forked beside torch's threads may hang.
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        predicted = [*pool.map(predicting.of_row, rows, chunksize=ROWS_AT_ONCE)]
    lines = []
    for row, values in zip(rows, predicted, strict=True):
        for quantity, measured in row.measured.items():
            about = {"key": row.key, "set": row.set, "source": row.source, "quantity": quantity, "measured": measured}
            about |= asdict(values.get(quantity, Predicted()))
            if row.set not in scored:
                about["first"] = about["ours"]
            # What is stored already has the first prediction.
            stored = old.get((row.key, quantity), Number.model_validate(about))
            lines.append(stored.model_copy(update=about).model_dump())
    import pandas as pd  # here, because it takes longer to import than an answer that reads this module's figures

    numbers.cache_clear()
    pd.DataFrame(lines).to_csv(FILE, index=False, float_format="%.6g")


def main(*, write: bool = False) -> None:
    """Show how far predictions are from measurements that others published.

    Args:
        write: Predict all published rows again, and store the result in reports/outside/predictions.csv.
    """
    if write:
        store_predictions()
    lines = by_set()
    for line in lines:
        line |= {name: percent(each) for name, each in line.items() if isinstance(each, float)}
    show(lines)


if __name__ == "__main__":
    with exit_on_stop():
        parsed(main, prog="python -m study.predict.outside.scores")
