"""Compares like with like: pairs runs of two sides by equal cell and machine."""

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass

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
