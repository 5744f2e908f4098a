"""First scores: what was predicted of frozen rows before anybody had seen an error on them. They are never renewed.

`python -m study.bench.first_scores SPLIT ...` predicts the rows of some splits for the first time, and
adds them to the file. Later mends of the predictor change the board, but not these figures.
"""

import csv
import sys
from collections import defaultdict
from statistics import mean, median
from typing import NamedTuple

from study.errors import Stop, exit_on_stop
from study.predictor.outside.published import FOLDER, Quantity, read_rows
from study.predictor.outside.trainings import ComparedRow, compare_all

FILE = FOLDER / "first_scores.csv"
NEAR = {"memory": 0.1, "time": 0.35}


class FirstScore(NamedTuple):
    """A published number of a frozen row, and what was predicted of it at first: bytes, or seconds of a step."""

    split: str
    source: str
    quantity: str
    measured: float | None = None  # None: what was published cannot be read as one of them, so it is not predicted
    predicted: float | None = None  # None: refused
    low: float | None = None
    high: float | None = None

    @property
    def error(self) -> float | None:
        return self.predicted / self.measured - 1 if self.predicted and self.measured else None

    @property
    def off(self) -> float | None:
        return None if self.error is None else abs(self.error)

    @property
    def inside(self) -> bool | None:
        if self.measured is None or self.low is None or self.high is None:
            return None
        return self.low <= self.measured <= self.high


def read() -> list[FirstScore]:
    """Return all first scores, in the order in which the splits were scored."""
    scores = []
    with FILE.open(newline="") as file:
        for split, source, quantity, *numbers in list(csv.reader(file))[1:]:
            scores.append(FirstScore(split, source, quantity, *(float(text) if text else None for text in numbers)))
    return scores


class Accuracy(NamedTuple):
    """How far off the first predictions of some rows were. All rows weigh the same, but for `inside`."""

    rows: int
    refused: float
    median_error: float
    near: float
    inside: float | None  # the interval, each source with the same weight. None: no prediction had one


def latest(quantity: Quantity) -> Accuracy:
    """Return how far off the predictions of the newest set of splits were."""
    everything = read()
    newest = _set_of(everything[-1])
    scores = [each for each in everything if each.quantity == quantity and _set_of(each) == newest]
    off = [each.off for each in scores if each.off is not None]
    inside = defaultdict(list)
    for each in scores:
        if each.inside is not None:
            inside[each.source].append(each.inside)
    return Accuracy(
        rows=len(scores),
        refused=1 - len(off) / len(scores),
        median_error=median(off),
        near=mean(each <= NEAR[quantity] for each in off),
        inside=mean(map(mean, inside.values())) if inside else None,
    )


def _set_of(score: FirstScore) -> str:
    """Return what the names of a set's splits end with, such as 2."""
    return score.split.rpartition("_")[2]


def add(splits: list[str]) -> None:
    """Predict the rows of some splits, and add them to the file. A split is scored once."""
    path = FOLDER / "frozen.csv"
    with path.open(newline="") as file:
        names = [line["split"] for line in csv.DictReader(file)]
    if unknown := set(splits) - set(names):
        raise Stop(f"{min(unknown)} is not a split of {path.name}", f"give one of {', '.join(sorted({*names}))}")
    if scored := {each.split for each in read()}.intersection(splits):
        raise Stop(f"{min(scored)} was scored before", "freeze rows of other sources")
    chosen = [(row, name) for row, name in zip(read_rows(path), names, strict=True) if name in splits]
    lines = []
    for (row, name), compared in zip(chosen, compare_all([row for row, _ in chosen]), strict=True):
        measured: dict[str, float | None] = {"memory": row.memory_bytes} if row.memory_bytes else {}
        if row.step_time_s or row.tokens_per_s_per_gpu:
            measured["time"] = row.step_s
        for quantity, value in measured.items():
            predicted = _predicted(compared, quantity)
            lines.append((name, row.source, quantity, value, *predicted))
    with FILE.open("a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


def _predicted(row: ComparedRow, quantity: str) -> tuple[float | None, ...]:
    """Return the prediction and its interval. What was refused has none."""
    for each in row.quantities:
        if each.quantity == quantity:
            return each.predicted, *(each.interval or (None, None))
    return None, None, None


if __name__ == "__main__":
    with exit_on_stop():
        add(sys.argv[1:])
