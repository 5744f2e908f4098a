"""Compare equal cells: a row is one cell in one environment."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from study.core.arms import NAMES
from study.core.numbers import number_of, short, times
from study.core.words import joined
from study.records import stats
from study.records.groups import by
from study.records.metrics import value
from study.records.runs import Run, Runs

NOTE = "from, to: 95 % interval over runs; vs A: s/step over that in A, a ratio between environments, not within a run"


@dataclass(frozen=True)
class Comparison:
    """The comparison, and the runs that are not in it."""

    rows: list[dict]  # one for each cell and environment
    environments: dict[str, dict]  # all that is known of each, by its letter
    left_out: dict[str, int]  # runs by status; "copy" counts records of runs that are already included
    unreadable: list[str]  # a sentence for each


def baseline_arm(runs: Iterable[Run], first: str = "ddp") -> str | None:
    """Return the arm that the others are compared with: `first`, or else the plainest arm that there is."""
    present = {run.arm for run in runs}
    return next((arm for arm in (first, *NAMES) if arm in present), None)


def loss_partner(run: Run, members: Iterable[Run], baseline: str | None) -> Run | None:
    """Return the baseline's run whose losses this run's should equal, or None if there is none.

    It has the same seed, rows per step and steps; of several, one with as many ranks is taken. Weights that are drawn
    in place differ from run to run, so such losses are not compared.
    """

    def alike(other: Run) -> tuple:
        return other.seed, other.rows_per_step, len(other.losses), other.requested.init == "in_place"

    if run.arm == baseline or run.requested.init == "in_place" or not run.losses:
        return None
    others = [other for other in members if other.arm == baseline and other.done and alike(other) == alike(run)]
    return min(others, key=lambda other: other.ranks != run.ranks, default=None)


def loss_distances(run: Run, partner: Run) -> list[float]:
    """Return how far the losses of two runs are apart at each step, in nats."""
    return [abs(ours - theirs) for ours, theirs in zip(run.losses, partner.losses, strict=True)]


def compare(runs: Runs) -> Comparison:
    """Return the finished runs as rows, with columns only for settings in which cells differ."""
    cells: dict[str, dict[str, list[Run]]] = {}  # by the key of the cell, then by DeepSpeed's resolved config
    for run in runs.done:
        resolved = json.dumps(run.resolved, sort_keys=True)
        cells.setdefault(run.key(without=("seed",)), {}).setdefault(resolved, []).append(run)
    columns = ["arm", *_differing([json.loads(key) for key in cells])]
    # Arms differ in many DeepSpeed keys. Show only those in which cells with the same settings differ.
    columns += [name for configs in cells.values() for name in _differing([json.loads(each) for each in configs])]
    rows = []
    for key, configs in cells.items():
        for resolved, members in configs.items():
            settings = json.loads(resolved) | json.loads(key)
            in_environment = by(members, "environment")
            for (letter,) in sorted(in_environment, key=lambda each: list(runs.environments).index(*each)):
                row = {name: settings.get(name) for name in columns} | {"environment": letter}
                rows.append(row | _numbers(in_environment[letter,], in_environment.get(("A",), [])))
    left_out = Counter(run.status for run in runs if not run.done)
    if runs.copies:
        left_out["copy"] = runs.copies
    return Comparison(rows, runs.environments, dict(left_out), list(runs.set_aside))


def answer(compared: Comparison) -> str:
    """Return how much longer steps take in other environments than in the first, for cells that both ran."""
    ratios: dict[str, list[float]] = {}
    for row in compared.rows:
        if row["vs A"] is not None and row["environment"] != "A":
            ratios.setdefault(row["environment"], []).append(row["vs A"])
    if not ratios:
        cells = number_of(len(compared.rows), "cells")
        return f"{cells}, none of them in two environments: no time is compared. --arms compares the arms."
    spans = []
    for letter, mine in ratios.items():
        most = f" to {times(max(mine))}" if len(mine) > 1 else ""
        spans.append(f"{letter} {times(min(mine))}{most} ({number_of(len(mine), 'cells')})")
    return f"Compared with environment A, a step takes in {joined(spans)} as long."


def notes(compared: Comparison) -> list[str]:
    """Return lines below the table: the letters of the environments, and the runs that are not in the table."""
    machines = list(compared.environments.values())
    names = _differing(machines) or [name for machine in machines[:1] for name in machine]
    if any("changed" in machine.get("commit", "") for machine in machines):
        names = list(dict.fromkeys([*names, "commit"]))
    lines = [
        f"{letter}: " + ", ".join(f"{name} {short(machine.get(name))}" for name in names)
        for letter, machine in compared.environments.items()
    ]
    lines += [NOTE] if machines else []
    lines += [f"left out: {number} {status}" for status, number in compared.left_out.items()]
    return lines + [f"unreadable: {sentence}" for sentence in compared.unreadable]


def _numbers(runs: list[Run], at_a: list[Run]) -> dict:
    """Return medians over the runs of one cell in one environment, and their step time over that in A."""
    step_s = _median(runs, "step_s")
    step_s_at_a = _median(at_a, "step_s")
    low = high = None
    if step_s is not None and len(runs) >= stats.FEWEST_RUNS:
        in_order = [value(run.record, "step_s") for run in sorted(runs, key=lambda run: run.folder)]
        _, low, high = stats.median_with_interval(in_order, np.random.default_rng(0))  # it depends on the order
    kind = "allocated"
    peak_bytes = _median(runs, "peak_allocated_bytes")
    if peak_bytes is None:
        kind = "tracked"
        peak_bytes = _median(runs, "tracked_peak_bytes")
    return {
        "runs": len(runs),
        "seeds": len({run.seed for run in runs}),
        "s/step": step_s,
        "from": low,
        "to": high,
        "vs A": step_s / step_s_at_a if step_s and step_s_at_a else None,
        "peak MB": None if peak_bytes is None else peak_bytes / 1e6,
        "peak of": None if peak_bytes is None else kind,
        "loss": _median(runs, "train_loss"),
        "eval loss": _median(runs, "eval_loss"),
    }


def _median(runs: list[Run], quantity: str) -> float | None:
    """Return the median over runs; None if one value is unknown, because a median of the rest would hide that."""
    values = [value(run.record, quantity) for run in runs]
    return stats.median(values) if values and None not in values else None


def _differing(several: list[dict]) -> list[str]:
    """Return the names whose values are not the same in all of them."""
    names = dict.fromkeys(name for each in several for name in each)
    return [name for name in names if len({json.dumps(each.get(name)) for each in several}) > 1]
