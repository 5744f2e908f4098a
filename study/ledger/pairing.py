"""Compares like with like: pairs runs of two sides by equal cell and machine, and gives a ratio for each pair."""

import json
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from study.ledger.arguments import is_number
from study.records import metrics, stats
from study.records.runs import Run

MACHINE = "machine"
# If the sides name the condition, these parts of the cell may differ as well. All other parts must be equal.
DECIDED_BY = {"batch": ("micro_batch", "accumulation"), "parameters": ("model",), "virtual": ("virtual_ranks",)}
DECIDED_BY |= dict.fromkeys(("stage", "offload", "wrapper", "offload_optimizer", "offload_param"), ("arm",))
DECIDED_BY |= dict.fromkeys(("device", "device_memory"), (MACHINE,))
SAME_DTYPE = ("weights", "moments")  # if these dtypes differ, so does the precision


class Pair(NamedTuple):
    """The runs of one cell: those of the first side, and those that they are compared to."""

    of: tuple[Run, ...]
    to: tuple[Run, ...]


class Ratio(NamedTuple):
    """A quantity on the first side over the same on the other, with its interval."""

    value: float
    low: float
    high: float
    runs: tuple[Run, ...]


def paired(of: Iterable[Run], to: Iterable[Run], named: set[str]) -> tuple[list[Pair], list[str]]:
    """The cells that were run on both sides, and why other cells are not comparable.

    `named` are the conditions in which the sides differ on purpose.
    """
    free = {"seed", *named, *(part for name in named for part in DECIDED_BY.get(name, ()))}
    ours, theirs = (_by_cell(runs, free) for runs in (of, to))
    pairs = [Pair(tuple(runs), tuple(theirs[key])) for key, runs in ours.items() if key in theirs]
    if not pairs:
        return [], _difference(ours, theirs, free)
    reasons = {pair: None if "precision" in named else _unlike_states(pair) for pair in pairs}
    return [pair for pair in pairs if not reasons[pair]], [reason for reason in reasons.values() if reason]


def _by_cell(runs: Iterable[Run], free: set[str]) -> dict[tuple, list[Run]]:
    cells = {}
    for run in runs:
        machine = None if MACHINE in free else json.dumps(run.machine, sort_keys=True)
        cells.setdefault((run.key(without=free), machine), []).append(run)
    return cells


def _difference(ours: dict[tuple, list[Run]], theirs: dict[tuple, list[Run]], free: set[str]) -> list[str]:
    """In which fields the two most similar cells differ, as a sentence. Empty if a side has no cells."""

    def cells(side: dict[tuple, list[Run]]) -> list[dict]:
        return [runs[0].cell | ({} if MACHINE in free else runs[0].machine) for runs in side.values()]

    others = cells(theirs)
    differ = [sorted(n for n in {*a, *b} - free if a.get(n) != b.get(n)) for a in cells(ours) for b in others]
    return [f"no cell was run on both sides: they differ in {', '.join(min(differ, key=len))}"] if differ else []


def _unlike_states(pair: Pair) -> str | None:
    """Why two sides of the same precision are not the same training: they hold their states in different dtypes."""
    for role in SAME_DTYPE:
        ours, theirs = ({run.record.observed.dtypes.get(role) for run in runs} - {None} for runs in pair)
        if ours and theirs and ours != theirs:
            return f"{role} are {' '.join(ours)} on one side and {' '.join(theirs)} on the other"
    return None


def ratio(pair: Pair, quantity: str, training: tuple[int | None, int | None]) -> Ratio | str:
    """The ratio of medians in a cell, or why there is none.

    Times and losses have a bootstrap interval over runs. Sizes repeat, so theirs is the range of what was measured.
    """
    sides = [
        [value for run in runs if (value := metrics.value(run.record, quantity, place)) is not None]
        for runs, place in zip(pair, training, strict=True)
    ]
    ours, theirs = sides
    if not all(sides):
        return f"{quantity} is not in the records"
    if not all(map(is_number, ours + theirs)):
        return f"{quantity} is not a number"
    if 0 in theirs:
        return f"{quantity} is 0 on the side to compare with"
    sort = metrics.sort_of(quantity)
    if not sort:
        return of_sizes(ours, theirs, pair)
    seeds = sort == "convergence"
    fewest = min(len({run.seed for run in runs} if seeds else runs) for runs in pair)
    if fewest < stats.FEWEST_RUNS:
        return f"{quantity} needs {stats.FEWEST_RUNS} {'seeds' if seeds else 'runs'} of each (got {fewest})"
    same_runs = pair.of == pair.to and len(ours) == len(theirs)  # two trainings of each run are compared
    method, runs = (stats.paired_ratio, pair.of) if same_runs else (stats.ratio_of_medians, pair.of + pair.to)
    return Ratio(*method(ours, theirs, np.random.default_rng(0)), runs)


def of_sizes(ours: list[float], theirs: list[float], pair: Pair) -> Ratio:
    low, high = min(ours) / max(theirs), max(ours) / min(theirs)
    return Ratio(stats.median(ours) / stats.median(theirs), low, high, pair.of + pair.to)


def united(ratios: list[Ratio]) -> Ratio:
    """One ratio for several cells: their median, and an interval that covers all of theirs."""
    runs = tuple(dict.fromkeys(run for ratio in ratios for run in ratio.runs))
    value = stats.median([ratio.value for ratio in ratios])
    return Ratio(value, min(ratio.low for ratio in ratios), max(ratio.high for ratio in ratios), runs)
