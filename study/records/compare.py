"""Compares equal cells: a row is one cell in one environment."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from study.io.numbers import short
from study.records import stats
from study.records.groups import by
from study.records.metrics import value
from study.records.runs import Run, Runs
from study.spec.arms import NAMES

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
    if run.arm == baseline or run.init == "in_place" or not run.losses:
        return None
    sizes = (run.seed, run.rows_per_step, len(run.losses))
    alike = [other for other in members if other.arm == baseline and other.done and other.init != "in_place"]
    alike = [other for other in alike if (other.seed, other.rows_per_step, len(other.losses)) == sizes]
    return min(alike, key=lambda other: other.ranks != run.ranks, default=None)


def loss_distances(run: Run, partner: Run) -> list[float]:
    """Return how far the losses of two runs are apart at each step, in nats."""
    return [abs(ours - theirs) for ours, theirs in zip(run.losses, partner.losses, strict=True)]


def compare(runs: Runs) -> Comparison:
    """The finished runs as rows, with columns only for settings in which cells differ."""
    cells: dict[tuple[str, str], list[Run]] = {}
    for run in runs.done:
        key = run.key(without=("seed",)), json.dumps(run.resolved, sort_keys=True)
        cells.setdefault(key, []).append(run)
    left_out = Counter(run.status for run in runs if not run.done)
    if runs.copies:
        left_out["copy"] = runs.copies
    return Comparison(_rows(cells, list(runs.environments)), runs.environments, dict(left_out), list(runs.set_aside))


def notes(compared: Comparison) -> list[str]:
    """Lines below the table: the letters of the environments, and the runs that are not in the table."""
    machines = list(compared.environments.values())
    names = _differing(machines) or [*machines[0]] if machines else []
    if "commit" not in names and any("changed" in machine.get("commit", "") for machine in machines):
        names.append("commit")
    text = [
        f"{letter}: " + ", ".join(f"{name} {short(machine.get(name))}" for name in names)
        for letter, machine in compared.environments.items()
    ]
    text += [NOTE] if machines else []
    text += [f"left out: {number} {why}" for why, number in compared.left_out.items()]
    return text + [f"unreadable: {sentence}" for sentence in compared.unreadable]


def _rows(cells: dict[tuple[str, str], list[Run]], letters: list[str]) -> list[dict]:
    resolved_of: dict[str, list[dict]] = {}
    for key, resolved in cells:
        resolved_of.setdefault(key, []).append(json.loads(resolved))
    columns = ["arm", *_differing([json.loads(key) for key in resolved_of])]
    # Arms differ in many DeepSpeed keys. Show only those in which cells with the same settings differ.
    columns += [name for several in resolved_of.values() for name in _differing(several)]
    rows = []
    for (key, resolved), runs in cells.items():
        settings, in_environment = json.loads(resolved) | json.loads(key), by(runs, "environment")
        for letter in (letter for letter in letters if (letter,) in in_environment):
            row = {name: settings.get(name) for name in columns} | {"environment": letter}
            rows.append(row | _numbers(in_environment[letter,], in_environment.get(("A",), [])))
    return rows


def _numbers(runs: list[Run], at_a: list[Run]) -> dict:
    """Medians over the runs of one cell in one environment, and their step time over that in A."""
    step_s, step_s_at_a = _median(runs, "step_s"), _median(at_a, "step_s")
    ratio = step_s / step_s_at_a if step_s and step_s_at_a else None
    low = high = None
    if step_s is not None and len(runs) >= stats.FEWEST_RUNS:
        in_order = sorted(runs, key=lambda run: run.folder)  # the interval depends on the order
        _, low, high = stats.median_with_interval(
            [value(run.record, "step_s") for run in in_order], np.random.default_rng(0)
        )
    peaks = {"allocated": _median(runs, "peak_allocated_bytes"), "tracked": _median(runs, "tracked_peak_bytes")}
    kind = next((kind for kind, size_bytes in peaks.items() if size_bytes is not None), None)
    peak = peaks[kind] if kind else None
    return {
        "runs": len(runs),
        "seeds": len({run.seed for run in runs}),
        "s/step": step_s,
        "from": low,
        "to": high,
        "vs A": ratio,
        "peak MB": peak / 1e6 if peak is not None else None,
        "peak of": kind,
        "loss": _median(runs, "train_loss"),
        "eval loss": _median(runs, "eval_loss"),
    }


def _median(runs: list[Run], quantity: str) -> float | None:
    """The median over runs; None if one value is unknown, because a median of the rest would hide that."""
    values = [value(run.record, quantity) for run in runs]
    return stats.median(values) if values and None not in values else None


def _differing(several: list[dict]) -> list[str]:
    """The names whose values are not the same in all of them."""
    names = dict.fromkeys(name for each in several for name in each)
    return [name for name in names if len({json.dumps(each.get(name)) for each in several}) > 1]
