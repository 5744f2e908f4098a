"""Compares like with like: pairs runs of two sides by equal cell and machine, and gives a ratio for each pair."""

import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from study.io.numbers import is_number
from study.records import metrics, stats
from study.records.runs import Run

MACHINE = "machine"
# If the sides name the condition, these parts of the cell may differ as well. All other parts must be equal.
DECIDED_BY: dict[str, tuple[str, ...]] = {"batch": ("micro_batch", "accumulation"), "parameters": ("model",)}
DECIDED_BY |= {"virtual": ("virtual_ranks",), "device": (MACHINE,), "device_memory": (MACHINE,)}
DECIDED_BY |= dict.fromkeys(("stage", "offload", "wrapper", "offload_optimizer", "offload_param"), ("arm",))
SAME_DTYPE = ("weights", "moments")  # if these dtypes differ, so does the precision


@dataclass(frozen=True)
class Pair:
    """The runs of one cell: those of the first side, and those that they are compared to."""

    of: tuple[Run, ...]
    to: tuple[Run, ...]


@dataclass(frozen=True)
class Ratio:
    """A quantity on the first side over the same on the other, with its interval."""

    value: float
    low: float
    high: float
    runs: tuple[Run, ...]


def paired(our_runs: Iterable[Run], their_runs: Iterable[Run], named: set[str]) -> tuple[list[Pair], list[str]]:
    """Return the cells that were run on both sides, and why other cells are not comparable.

    `named` are the conditions in which the sides differ on purpose.
    """
    free = {"seed", *named, *itertools.chain.from_iterable(DECIDED_BY.get(name, ()) for name in named)}
    ours = _by_cell(our_runs, free)
    theirs = _by_cell(their_runs, free)
    pairs = [Pair(tuple(runs), tuple(theirs[key])) for key, runs in ours.items() if key in theirs]
    if not pairs:
        return [], _difference(ours, theirs, free)
    if "precision" in named:
        return pairs, []
    reasons = [_unlike_states(pair) for pair in pairs]
    alike = [pair for pair, reason in zip(pairs, reasons, strict=True) if not reason]
    return alike, [reason for reason in reasons if reason]


def _by_cell(runs: Iterable[Run], free: set[str]) -> dict[tuple, list[Run]]:
    cells: dict[tuple, list[Run]] = {}
    for run in runs:
        machine = None if MACHINE in free else json.dumps(run.machine, sort_keys=True)
        cells.setdefault((run.key(without=free), machine), []).append(run)
    return cells


def _difference(ours: dict[tuple, list[Run]], theirs: dict[tuple, list[Run]], free: set[str]) -> list[str]:
    """Return in which fields the two most similar cells differ, as a sentence. Empty if a side has no cells."""
    fields = []
    for side in (ours, theirs):
        firsts = [runs[0] for runs in side.values()]
        fields.append([run.cell | ({} if MACHINE in free else run.machine) for run in firsts])
    differ = [
        [name for name in sorted({*a, *b} - free) if a.get(name) != b.get(name)] for a, b in itertools.product(*fields)
    ]
    return [
        f"no cell was run on both sides: they differ in {', '.join(names)}" for names in sorted(differ, key=len)[:1]
    ]


def _unlike_states(pair: Pair) -> str | None:
    """Return why two sides of the same precision are not the same training: they hold states in different dtypes."""
    for role in SAME_DTYPE:
        ours, theirs = ({run.record.observed.dtypes.get(role) for run in side} - {None} for side in (pair.of, pair.to))
        if ours and theirs and ours != theirs:
            return f"{role} are {' '.join(map(str, ours))} on one side and {' '.join(map(str, theirs))} on the other"
    return None


def by_seed(runs: Iterable[Run], value: Callable[[Run], Any]) -> dict[int | None, list]:
    """Return the known values of the runs of each seed."""
    values: dict[int | None, list] = {}
    for run in runs:
        if (known := value(run)) is not None:
            values.setdefault(run.record.requested.seed, []).append(known)
    return values


def ratio(pair: Pair, quantity: str, training: tuple[int | None, int | None]) -> Ratio | str:
    """Return the ratio of medians in a cell, or why there is none.

    Times and losses have a bootstrap interval over runs. Sizes repeat, so theirs is the range of what was measured.
    """
    ours = _values(pair.of, quantity, training[0])
    theirs = _values(pair.to, quantity, training[1])
    if not ours or not theirs:
        return f"{quantity} is not in the records"
    if not all(map(is_number, ours + theirs)):
        return f"{quantity} is not a number"
    if 0 in theirs:
        return f"{quantity} is 0 on the side to compare with"
    sort = metrics.sort_of(quantity)
    if not sort:
        return of_sizes(ours, theirs, pair)
    fewest = min(_repeats(pair.of, sort), _repeats(pair.to, sort))
    if fewest < stats.FEWEST_RUNS:
        repeats = "seeds" if sort == "convergence" else "runs"
        return f"{quantity} needs {stats.FEWEST_RUNS} {repeats} of each (got {fewest})"
    random = np.random.default_rng(0)
    if pair.of == pair.to and len(ours) == len(theirs):  # two trainings of each run are compared
        return Ratio(*stats.paired_ratio(ours, theirs, random), pair.of)
    return Ratio(*stats.ratio_of_medians(ours, theirs, random), pair.of + pair.to)


def _values(runs: tuple[Run, ...], quantity: str, training: int | None) -> list[float]:
    values = [metrics.value(run.record, quantity, training) for run in runs]
    return [value for value in values if value is not None]


def _repeats(runs: tuple[Run, ...], sort: str) -> int:
    """Return how often a cell was run. For losses, a seed counts once."""
    return len({run.record.requested.seed for run in runs}) if sort == "convergence" else len(runs)


def of_sizes(ours: list[float], theirs: list[float], pair: Pair) -> Ratio:
    low = min(ours) / max(theirs)
    high = max(ours) / min(theirs)
    return Ratio(stats.median(ours) / stats.median(theirs), low, high, pair.of + pair.to)


def united(ratios: list[Ratio]) -> Ratio:
    """Return one ratio for several cells: their median, and an interval that covers all of theirs."""
    runs = dict.fromkeys(itertools.chain.from_iterable(each.runs for each in ratios))
    value = stats.median([each.value for each in ratios])
    return Ratio(value, min(each.low for each in ratios), max(each.high for each in ratios), tuple(runs))
