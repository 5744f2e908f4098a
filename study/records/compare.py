"""Compares runs: equal cells on machines, losses with a baseline, the sides of a ratio, and the peaks of two runs."""

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from study.core.arms import NAMES
from study.core.errors import Stop
from study.core.text import nats, number_of, short, times
from study.records import metrics
from study.records.groups import LABELS, differing, grouped
from study.records.runs import FIRST_OPTIMIZER, Run, Runs

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
    keep_gradients: list[str]  # arms of FSDP with several passes in a step
    one_memory: list[str]  # arms that offload, without a GPU


def compare(runs: Runs) -> Comparison:
    """Return the finished runs as rows, with columns only for settings in which cells differ."""
    cells = grouped(runs.done, lambda run: (run.key(["seed"]), run.record.observed.data_checksum))
    columns = ["arm", *differing([json.loads(key) for key, _ in cells])]
    if len({key for key, _ in cells}) < len(cells):  # the data of a task differ less often than tasks do
        columns.append("data_checksum")
    # --- a row for each cell and environment, beside the same in environment A
    rows = []
    for (key, checksum), members in cells.items():
        settings = json.loads(key) | {"data_checksum": checksum}
        about = {name: settings.get(name) for name in columns}
        in_environment = grouped(members, lambda run: run.environment)
        for letter in runs.environments:
            if letter in in_environment:
                numbers = _numbers(in_environment[letter], in_environment.get("A", []))
                rows.append(about | {"environment": letter} | numbers)
    left_out = Counter[str](run.record.status for run in runs if run.record.status != "done")
    if runs.copies:
        left_out["copy"] = runs.copies
    # Accelerate reduces in the last pass alone, unless a script sets sync_each_batch: seen on an H200, 18.5 of 44.6 GB.
    keeping = [run for run in runs.done if run.record.observed.fsdp and (run.record.observed.accumulation or 1) > 1]
    arms = sorted({run.record.arm for run in keeping})
    return Comparison(rows, runs.environments, left_out, list(runs.set_aside), arms, one_memory(runs.done))


def answer(compared: Comparison) -> str:
    """Return how long steps take in other environments, of cells that the first one ran as well."""
    ratios = [row["vs A"] for row in compared.rows if row["environment"] != "A" and row["vs A"] is not None]
    cells = number_of(len(ratios or compared.rows), "cells")
    if not ratios:
        return f"{cells}, none of them in two environments: no time is compared. --arms compares the arms."
    return f"A step takes {times(min(ratios))} to {times(max(ratios))} as long as in environment A ({cells})."


def notes(compared: Comparison) -> list[str]:
    """Return the lines below the table: what tells the environments apart, and the runs that are not in the table."""
    machines = compared.environments
    names = differing([*machines.values()]) or machines.get("A", {})  # of a single machine all that is known
    lines = [
        f"{letter}: " + ", ".join(f"{name} {short(machine.get(name))}" for name in names)
        for letter, machine in machines.items()
    ]
    lines.append(NOTE)
    whole = "a rank keeps whole gradients between micro-batches (GUIDE, FSDP2 or ZeRO)"
    lines += [f"{arm}: {whole}" for arm in compared.keep_gradients]
    lines += in_one_memory(compared.one_memory)
    lines += [f"left out: {number} {status}" for status, number in compared.left_out.items()]
    return lines + [f"unreadable: {sentence}" for sentence in compared.unreadable]


def _numbers(runs: list[Run], at_a: list[Run]) -> dict:
    """Return medians over the runs of one cell in one environment, and their step time over that in A."""
    times_s = metrics.all_known(metrics.value(run.record, "step_s") for run in runs)
    low = high = None
    if len(times_s) >= FEWEST_RUNS:
        # A fixed order and seed: the same runs give the same interval, in every report.
        _, low, high = median_with_interval(times_s, np.random.default_rng(0))
    # The tracked peak without a GPU, or where one of the runs does not know what its allocator held.
    peak_bytes = _median(runs, "peak_allocated_bytes")
    kind = "allocated"
    if peak_bytes is None:
        peak_bytes = _median(runs, "tracked_peak_bytes")
        kind = "tracked"
    return {
        "runs": len(runs),
        "seeds": len({run.record.requested.seed for run in runs}),
        "s/step": metrics.median(times_s),
        "from": low,
        "to": high,
        "vs A": metrics.over(metrics.median(times_s), _median(at_a, "step_s")),
        "peak MB": metrics.over(peak_bytes, 1e6),
        "peak of": kind if peak_bytes else None,
        "loss": _median(runs, "train_loss"),
        "eval loss": _median(runs, "eval_loss"),
    }


def _median(runs: list[Run], quantity: str) -> Any:
    return metrics.median(metrics.value(run.record, quantity) for run in runs)


# --- peaks without a GPU --------------------------------------------------------------------------------------------


def has_one_memory(run: Run) -> bool:
    """Return whether an arm offloads, and the machine has no GPU: what it holds on a GPU cannot be told apart."""
    observed = run.record.observed
    return observed.device == "cpu" and bool(observed.offloads)


def one_memory(runs: Iterable[Run]) -> list[str]:
    return sorted({run.record.arm for run in runs if has_one_memory(run)})


def in_one_memory(arms: list[str]) -> list[str]:
    """Return the line below a table of peaks that keeps a reader from taking them for those of a GPU."""
    if not arms:
        return []
    return [f"{', '.join(arms)}: without a GPU, host and device are one memory. Peaks include what is offloaded."]


# --- losses of arms and of a baseline -------------------------------------------------------------------------------


def loss_distances(run: Run, members: Iterable[Run], first: str = "ddp") -> tuple[str | None, list[float]]:
    """Return the baseline and how far a run's losses are from its losses at each step, in nats; None without one.

    It is the arm `first`, or else the plainest arm that there is. Of its runs, one of the same seed, rows per step and
    steps counts, with as many ranks if there is one.
    """
    trained = [other for other in members if other.record.status == "done" and other.record.loss.train]
    by_arm = grouped(trained, lambda other: other.record.arm)
    known = [arm for arm in (first, *NAMES) if arm in by_arm]
    if not known:
        return None, []
    baseline = known[0]
    others = [other for other in by_arm[baseline] if _training(other) == _training(run)]
    # The baseline's own other seeds and ranks are no deviation. Weights that are drawn in place depend on how a model
    # is divided, so such losses are of other models.
    if not others or run.record.arm == baseline or run.record.requested.init == "in_place":
        return None, []
    nearest = max(others, key=lambda other: other.record.observed.ranks == run.record.observed.ranks)
    # What to expect: with equal clipping, weights and rows, DDP and stages 0 to 3 agree to six digits in fp32, with
    # offload to the host as well (measured with two gloo processes). A larger distance has a cause.
    theirs = nearest.record.loss.train
    return baseline, [abs(our - their) for our, their in zip(run.record.loss.train, theirs, strict=True)]


def _training(run: Run) -> tuple:
    record = run.record
    return record.requested.seed, record.observed.rows_per_step, len(record.loss.train), record.requested.init


EARLY = 10  # steps: later rounding grows, to 1.9e-3 nats in 100 steps of a small BERT
FAR = 1e-3  # nats. Of all kept pairs of such runs, 999, none is further apart than 5.2e-6 in these steps


def unequal_losses(runs: Iterable[Run]) -> list[str]:
    """Return a sentence for each run whose early losses are not those of an equal training, further than rounding.

    Equal are weights, data, settings and clipping: all but the arm. Told of AdamW in fp32 alone, where arms agree.
    """
    sentences = []
    for first, *others in grouped(filter(_is_exact, runs), _equal_training).values():
        for other in others:
            losses = zip(first.record.loss.train[:EARLY], other.record.loss.train[:EARLY], strict=False)
            distance = max(abs(our - their) for our, their in losses)
            if distance > FAR:
                of = " and ".join(f"{run.record.run_id} ({run.record.arm})" for run in (first, other))
                sentences.append(
                    f"The losses of {of} differ by {nats(distance)} in the first {EARLY} steps. Weights, data "
                    "and settings are equal, so that is no rounding: one of the two trains wrongly."
                )
    return sentences


def _is_exact(run: Run) -> bool:
    """Return whether the losses of a run are those of any arm, but for rounding."""
    record = run.record
    asked, observed = record.requested, record.observed
    is_plain = asked.precision == "fp32" and asked.optimizer in (None, FIRST_OPTIMIZER) and not observed.tf32
    return is_plain and bool(record.loss.train and observed.weights_checksum and observed.data_checksum)


def _equal_training(run: Run) -> tuple:
    observed = run.record.observed
    rows = (observed.rows_per_step, observed.tokens_per_step, observed.accumulation)
    checksums = (observed.weights_checksum, observed.data_checksum)
    return (run.key(["arm", "allocator"]), *checksums, *rows, observed.clipping)


# --- the two sides of a ratio ---------------------------------------------------------------------------------------


def paired(our_runs: Iterable[Run], their_runs: Iterable[Run], named: set[str]) -> list[tuple[list[Run], list[Run]]]:
    """Return the runs of each cell that was run on both sides, which differ in the `named` conditions on purpose."""
    free = {"seed", *named}
    if "batch" in named:  # of all ranks: it follows from these two
        free |= {"micro_batch", "accumulation"}

    def cell(run: Run) -> tuple[str, str]:
        return run.key(free), json.dumps(run.machine, sort_keys=True)

    theirs = grouped(their_runs, cell)
    return [(runs, theirs[key]) for key, runs in grouped(our_runs, cell).items() if key in theirs]


# --- the peaks of two runs ------------------------------------------------------------------------------------------

OF_EITHER = "activations or temporaries"
# By component, what decides how much of it a rank holds, from the sources of DeepSpeed 0.19.8.
REASONS = {
    "weights": "stage 3 and FSDP keep a part on each rank, tensor parallelism a part of each layer; a dtype is wider",
    "master": "DeepSpeed keeps an fp32 copy of the weights that a rank updates, even of fp32 weights",
    "gradients": "from stage 2 on a rank keeps those of its partition, stage 3 also between steps; several microbatches"
    " and updates need copies; 0 bytes: none were there at the moment of this peak",
    "moments": "from stage 1 on a rank holds the optimizer states of its partition only; offloaded, none",
    "buckets": "their size is reduce_bucket_size, however small the model is and however many ranks share it",
    "gathered_weights": "stage 3 and FSDP gather whole weights to use them; stage 3 releases only what is not"
    " used again within stage3_max_reuse_distance, a billion elements by default",
    "activations": "no stage partitions them: sequences or tokens differ, ranks share sequences, or peaks are at other"
    " moments",
    "temporaries": "single operations need them briefly: the update's copies of gradients, norms",
    "activations or temporaries": "an older record counts the update's copies, gradients flat and in fp32, as"
    " activations. At a peak in DeepSpeed's update all are such copies",
    "other": "the data set on this rank, and what was allocated before training",
    "constants": "buffers of the model, such as masks and positions: no arm partitions them",
    "staging": "offloaded tensors pass through buffers",
    "swap": "tensors on disk pass through buffers",
}


# With one of these a rank holds other tensors under any arm. Of scripts that were watched the last two are known.
TRAINED = ("task", "model", "precision", "micro_batch", "accumulation", "sequence", "parameters", "tokens_per_step")


def differences(first: Run, second: Run) -> str:
    """Return what two runs train otherwise, apart from their arms, with both values."""
    ours, theirs = first.cell, second.cell
    keys = [key for key in TRAINED if ours.get(key) != theirs.get(key)]
    return ", ".join(f"{LABELS.get(key, key)} {short(ours.get(key))} and {short(theirs.get(key))}" for key in keys)


def peaks(first: Run, second: Run) -> list[dict]:
    """Return the components of two peaks, that which changes most first."""
    ours, theirs = _held(first), _held(second)
    if not (_tells_apart(first, ours) and _tells_apart(second, theirs)):
        for held in (ours, theirs):
            held[OF_EITHER] = held.pop("activations", 0) + held.pop("temporaries", 0)
    rows = [{"component": name, "first": ours.get(name, 0), "second": theirs.get(name, 0)} for name in ours | theirs]
    return sorted(rows, key=lambda row: -abs(row["second"] - row["first"]))


def reasons(rows: list[dict]) -> list[str]:
    """Return why components differ between two runs of which only the arms differ."""
    differing = [row["component"] for row in rows if row["first"] != row["second"]]
    return [f"{component}: {REASONS[component]}" for component in differing if component in REASONS]


def _held(run: Run) -> dict[str, int]:
    held = metrics.components(run.record)
    if not held:
        what = f"{run.record.run_id} ({run.record.arm}, {run.record.status}) has no memory by component"
        raise Stop(what, "run it again to its end, without --no-instruments")
    return dict(held)


def _tells_apart(run: Run, held: dict[str, int]) -> bool:
    """Return whether what a record calls activations is surely none of the copies that DeepSpeed's update makes.

    Of the gradients that a rank updates these are one flat and one in fp32: at most twice the master copy.
    """
    is_more_than_copies = 0 < 2 * held.get("master", 0) < held.get("activations", 0)
    return run.record.measure_version >= 4 or not run.record.observed.deepspeed or is_more_than_copies
