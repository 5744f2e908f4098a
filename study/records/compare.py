"""Compares runs: equal cells on machines, losses with a baseline, the sides of a ratio, and the peaks of two runs."""

import itertools
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from study.core.arms import NAMES
from study.core.errors import Stop
from study.core.text import number_of, short, times
from study.records import metrics
from study.records.groups import differing, grouped
from study.records.runs import Run, Runs
from study.records.sections import RankMemory

# --- intervals ------------------------------------------------------------------------------------------------------
# Step times have a long tail on one side, so medians are compared by a percentile bootstrap, without assuming a normal
# distribution. The generator is an argument: the same numbers in the same order, and the same seed, give the same ends.

FEWEST_RUNS = 3  # for an interval of time or loss: one or two runs do not show the spread
RESAMPLES = 2000


def median_with_interval(values: Sequence[float], rng: np.random.Generator) -> tuple[float, float, float]:
    """The median and the ends of its 95 % interval."""
    resamples = rng.choice(np.asarray(values, float), (RESAMPLES, len(values)))
    low, high = np.quantile(np.median(resamples, axis=1), [0.025, 0.975])
    return float(statistics.median(values)), float(low), float(high)


# --- equal cells between machines -----------------------------------------------------------------------------------

NOTE = "from, to: 95 % interval over runs; vs A: s/step over that in A, a ratio between environments, not within a run"


@dataclass(frozen=True)
class Comparison:
    """A row for each cell and environment, and the runs that are in none."""

    rows: list[dict]
    environments: dict[str, dict]  # all that is known of each, by its letter
    left_out: dict[str, int]  # runs by status; "copy" counts records of runs that are already included
    unreadable: list[str]  # a sentence for each


def compare(runs: Runs) -> Comparison:
    """The finished runs as rows, with columns only for settings in which cells differ."""
    cells = grouped(runs.done, lambda run: run.key(without=("seed",)))
    columns = ["arm", *differing([json.loads(key) for key in cells])]
    # --- each cell by DeepSpeed's resolved config, which a release may fill in otherwise
    resolved = {
        key: grouped(members, lambda run: json.dumps(run.resolved, sort_keys=True)) for key, members in cells.items()
    }
    for configs in resolved.values():
        # Arms differ in many of its keys. Show only those in which cells with the same settings differ.
        columns += differing([json.loads(config) for config in configs])
    # --- a row for each cell, config and environment, beside the same in environment A
    rows = []
    for key, configs in resolved.items():
        for config, members in configs.items():
            settings = json.loads(config) | json.loads(key)
            in_environment = grouped(members, lambda run: run.environment)
            for letter in sorted(in_environment, key=list(runs.environments).index):
                row = {name: settings.get(name) for name in columns} | {"environment": letter}
                rows.append(row | _numbers(in_environment[letter], in_environment.get("A", [])))
    left_out = Counter[str](run.record.status for run in runs if run.record.status != "done")
    left_out["copy"] = runs.copies
    return Comparison(rows, runs.environments, dict(+left_out), list(runs.set_aside))  # without a count of 0


def answer(compared: Comparison) -> str:
    """How long steps take in other environments, of cells that the first one ran as well."""
    ratios = [row["vs A"] for row in compared.rows if row["environment"] != "A" and row["vs A"] is not None]
    if not ratios:
        cells = number_of(len(compared.rows), "cells")
        return f"{cells}, none of them in two environments: no time is compared. --arms compares the arms."
    cells = number_of(len(ratios), "cells")
    return f"A step takes {times(min(ratios))} to {times(max(ratios))} as long as in environment A ({cells})."


def notes(compared: Comparison) -> list[str]:
    """Lines below the table: the letters of the environments, and the runs that are not in the table."""
    machines = compared.environments
    # What tells the machines apart; of a single one all that is known.
    names = differing(list(machines.values())) or list(machines.get("A", {}))
    if any("changed" in machine.get("commit", "") for machine in machines.values()):
        names = list(dict.fromkeys([*names, "commit"]))
    lines = []
    for letter, machine in machines.items():
        lines.append(f"{letter}: " + ", ".join(f"{name} {short(machine.get(name))}" for name in names))
    lines.append(NOTE)
    lines += [f"left out: {number} {status}" for status, number in compared.left_out.items()]
    return lines + [f"unreadable: {sentence}" for sentence in compared.unreadable]


def _numbers(runs: list[Run], at_a: list[Run]) -> dict:
    """Medians over the runs of one cell in one environment, and their step time over that in A."""
    names = ("step_s", "peak_allocated_bytes", "tracked_peak_bytes", "train_loss", "eval_loss")
    middle = {name: metrics.median(metrics.value(run.record, name) for run in runs) for name in names}
    step_s_at_a = metrics.median(metrics.value(run.record, "step_s") for run in at_a)
    low = high = None
    if middle["step_s"] is not None and len(runs) >= FEWEST_RUNS:
        in_order = [metrics.value(run.record, "step_s") for run in sorted(runs, key=lambda run: run.folder)]
        # A fixed seed and order: the same runs give the same interval, in every report.
        _, low, high = median_with_interval(in_order, np.random.default_rng(0))
    kind, peak_bytes = "allocated", middle["peak_allocated_bytes"]
    # Without a GPU, or where one of the runs does not know what its allocator held.
    if peak_bytes is None:
        kind, peak_bytes = "tracked", middle["tracked_peak_bytes"]
    return {
        "runs": len(runs),
        "seeds": len({run.record.requested.seed for run in runs}),
        "s/step": middle["step_s"],
        "from": low,
        "to": high,
        "vs A": metrics.over(middle["step_s"], step_s_at_a),
        "peak MB": peak_bytes and peak_bytes / 1e6,
        "peak of": peak_bytes and kind,
        "loss": middle["train_loss"],
        "eval loss": middle["eval_loss"],
    }


# --- losses of arms and of a baseline -------------------------------------------------------------------------------


def loss_distances(run: Run, members: Iterable[Run], first: str = "ddp") -> tuple[str | None, list[float]]:
    """How far a run's losses are from the baseline's at each step, in nats, and which arm that is.

    The baseline is the arm `first`, or else the plainest arm that there is. Of its runs, one of the same seed, rows per
    step and steps counts, with as many ranks if there is one; None if there is none.
    """
    trained = [other for other in members if other.record.status == "done" and other.record.loss.train]
    present = {other.record.arm for other in trained}
    baseline = next((arm for arm in (first, *NAMES) if arm in present), None)
    others = [other for other in trained if other.record.arm == baseline and _training(other) == _training(run)]
    # The baseline's own other seeds and ranks are no deviation. Weights that are drawn in place depend on how a model
    # is divided, so such losses are of other models.
    if not others or run.record.arm == baseline or run.record.requested.init == "in_place":
        return None, []
    ranks = run.record.observed.ranks
    theirs = max(others, key=lambda other: other.record.observed.ranks == ranks).record.loss.train
    return baseline, [abs(our - their) for our, their in zip(run.record.loss.train, theirs, strict=True)]


def _training(run: Run) -> tuple:
    """What two runs must share for their losses to be comparable."""
    record = run.record
    return record.requested.seed, record.observed.rows_per_step, len(record.loss.train), record.requested.init


# --- the two sides of a ratio ---------------------------------------------------------------------------------------


def paired(our_runs: Iterable[Run], their_runs: Iterable[Run], named: set[str]) -> list[tuple[list[Run], list[Run]]]:
    """The runs of each cell that was run on both sides. `named` are the conditions in which these differ on purpose."""
    free = {"seed", *named}
    if "batch" in named:  # of all ranks: it follows from these two
        free |= {"micro_batch", "accumulation"}
    ours, theirs = (
        grouped(side, lambda run: (run.key(without=free), json.dumps(run.machine, sort_keys=True)))
        for side in (our_runs, their_runs)
    )
    pairs = [(runs, theirs[cell]) for cell, runs in ours.items() if cell in theirs]
    return [pair for pair in pairs if "precision" in named or _same_dtypes(*pair)]


def _same_dtypes(our_runs: list[Run], their_runs: list[Run]) -> bool:
    """Whether both sides hold states in the same dtypes: if not, they are not one precision."""
    for role in ("weights", "moments"):
        # None: records of schema 1 did not say it.
        ours, theirs = (
            {run.record.observed.dtypes.get(role) for run in side} - {None} for side in (our_runs, their_runs)
        )
        if ours and theirs and ours != theirs:
            return False
    return True


# --- the peaks of two runs ------------------------------------------------------------------------------------------

TRACKED = "all that is tracked"
BEYOND = ("seen by the allocator alone", "reserved and not in use", "outside the allocator")
NEGLIGIBLE = 0.05  # of all that changes: a smaller part gets no reason
# By component, why it grew and why it shrank, from the sources of DeepSpeed 0.19.8.
REASONS = {
    "weights": (
        "the weights are not partitioned, are in a wider dtype, or are kept twice",
        "a rank keeps only its partition, its part of each layer, or a narrower dtype",
    ),
    "master": (
        "the optimizer keeps an fp32 copy of the weights; DeepSpeed does so even for fp32 weights",
        "a rank keeps the fp32 copy of its partition only, or none",
    ),
    "gradients": (
        "gradients are not partitioned, of several microbatches, or copied for the update",
        "a rank keeps the gradients of its partition only, or they were already moved into buckets",
    ),
    "moments": (
        "this rank holds the optimizer states of a larger part of the model",
        "a rank keeps the optimizer states of its partition only, or they are on disk",
    ),
    "buckets": (
        "their size is reduce_bucket_size, however small the model is and however many ranks share it",
        "there are fewer buckets, or their dtype is narrower",
    ),
    "gathered_weights": (
        "stage 3 and FSDP gather whole weights to use them; stage 3 releases them only after stage3_max_live_parameters"
        " and stage3_max_reuse_distance, a billion parameters by default",
        "fewer weights are gathered at once",
    ),
    "activations": (
        "no stage partitions activations: there are more rows or tokens, or the peaks are at different moments",
        "no stage partitions activations: ranks that read the same rows each keep a part, there are fewer rows or"
        " tokens, or the peaks are at different moments",
    ),
    "temporaries": ("single operations need them briefly: copies, norms, flattened gradients",) * 2,
    "other": ("the data set on this rank, and what was allocated before training",) * 2,
    "staging": ("offloaded tensors pass through buffers", None),
    "swap": ("tensors on disk pass through buffers", None),
}


def peaks(first: Run, second: Run) -> list[dict]:
    """The difference of two peaks by component, the largest difference first, with the reason of a large one.

    `share` is a component's part of all changes, whether it grows or shrinks. Last come the sum of the components, and
    the rows that lead from there to the memory that the device reports as used.
    """
    ours, theirs = (_held(run) for run in (first, second))
    rows = [_row(name, ours.get(name, 0), theirs.get(name, 0)) for name in ours | theirs]
    rows.sort(key=lambda row: -abs(row["difference"]))
    changed_bytes = sum(abs(row["difference"]) for row in rows)
    for row in rows:
        row["share"] = abs(row["difference"]) / max(changed_bytes, 1)
        if row["share"] > NEGLIGIBLE:
            grew, shrank = REASONS.get(row["component"], (None, None))
            row["why"] = grew if row["difference"] > 0 else shrank
    rows.append(_row(TRACKED, sum(ours.values()), sum(theirs.values())))
    return rows + [_row(name, *sizes) for name, *sizes in zip(BEYOND, _beyond(first), _beyond(second), strict=True)]


def _held(run: Run) -> dict[str, int]:
    if components := metrics.components(run.record):
        return components
    what = f"{run.record.run_id} ({run.record.arm}, {run.record.status}) has no memory by component"
    raise Stop(what, "run it again to its end, without --no-instruments")


def _beyond(run: Run) -> list[int | None]:
    """What only the device reports of the rank that held most, as steps between its levels; None without a GPU."""
    number = metrics.fullest_rank(run.record) or 0
    # A record may have components without sizes of the device: then all of these are None.
    device = [*run.record.memory.per_rank[number : number + 1], RankMemory()][0]
    levels = [
        run.record.memory.components.per_rank[number].tracked_peak_bytes,
        device.peak_allocated_bytes,
        device.peak_reserved_bytes,
        device.device_used_bytes,
    ]
    return [_difference(*pair) for pair in itertools.pairwise(levels)]


def _row(name: str, first: int | None, second: int | None) -> dict:
    difference = _difference(first, second)
    return {"component": name, "first": first, "second": second, "difference": difference, "share": None, "why": None}


def _difference(lower: int | None, upper: int | None) -> int | None:
    if lower is None or upper is None:
        return None
    return upper - lower


def unlike(first: Run, second: Run) -> list[dict]:
    """The settings besides the arm and the seed in which two runs differ."""
    sides = [run.cell | {"measure version": run.record.measure_version} for run in (first, second)]
    rows = []
    for name in differing(sides):
        # Another arm is what they are compared for, and another seed changes no size.
        if name not in ("arm", "seed"):
            rows.append({"setting": name, "first": sides[0].get(name), "second": sides[1].get(name)})
    return rows
