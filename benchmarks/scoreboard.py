"""Compares predictions of peak memory with measured peaks: ours, DeepSpeed's, Accelerate's and PyTorch's.

python benchmarks/scoreboard.py runs/scoreboard runs/smoke
"""

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, cast

import fsdp_tracker
import pandas as pd
import tyro
from estimators import accelerate_bytes, deepspeed_bytes

from study.core.errors import Stop, exit_on_stop
from study.core.gpus import GPUS, gpu_named
from study.core.options import parsed
from study.core.shapes import SHAPES, shape_of
from study.core.text import say, show
from study.predict.estimate import Estimate
from study.predict.front import Hardware, Training, memory_kinds, step_time
from study.predict.trace.transformer import Transformer
from study.records import metrics, runs
from study.records.runs import Run, Runs
from study.report.of_record import architecture, predicted, training_of

HELD_OUT = "held-out"  # parts of the protocol that no constant was derived from
# PyTorch's FSDPMemTracker follows FSDP2, and stands beside stage 3 without offloading, the arm that is most like it.
PREDICTORS = ("ours", "deepspeed", "accelerate", "torch")
STATES_ONLY = "deepspeed, states"
ESTIMATED = ("weights", "master", "moments", "gradients", "buckets")  # all that DeepSpeed's estimators predict
HIDDEN = ("family", "arm", "held out", "acc", STATES_ONLY)  # columns for JSON alone: a line has 100 characters
GOAL = 0.01
FIELDS = {"allocated": "peak_allocated_bytes", "reserved": "peak_reserved_bytes", "driver": "device_used_bytes"}


def main(
    folders: tyro.conf.Positional[tuple[Path, ...]],
    /,
    *,
    every_cell: bool = False,
    tracker: bool = True,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> list[dict] | None:
    """Print each predictor's median and worst error, ours by family and by arm, and the cells where ours misses.

    Of runs on a GPU, print as well how far off the predictions of PyTorch's and the driver's memory and of the step
    time are.

    Args:
        folders: Folders with runs in them, at any depth.
        every_cell: Print each cell, not only those that ours misses by more than 1 %.
        tracker: Ask PyTorch's FSDPMemTracker as well, which takes some seconds for a cell of stage 3.
        as_json: Print the rows as JSON instead.
    """
    if not folders:
        raise Stop("no folder is given", "name folders with runs, such as runs/scoreboard")
    loaded = runs.load(folders, every_folder_has_runs=True)
    rows = scored(loaded, tracker)
    if as_json:
        return rows
    show([_shown(row) for row in rows if every_cell or abs(row["ours"]) > GOAL])
    table = pd.DataFrame(rows)
    parts = {"all": table, "held out": table[table["held out"]]}
    names = [(part, name) for part in parts for name in (*PREDICTORS, STATES_ONLY) if parts[part][name].notna().any()]
    show([{"predictor": name, "of": part} | errors(parts[part][name]) for part, name in names])
    for by in ("family", "arm"):
        show([{by: name} | errors(group["ours"]) for name, group in table.groupby(by)])
    on_gpu = measured_on_gpu(loaded)
    if len(on_gpu):
        say("", "On the GPU: what was measured, and predicted over measured.")
        show(on_gpu.to_dict("records"))
    return None


def _shown(row: dict) -> dict:
    percents = {name: f"{row[name]:+.1%}" for name in PREDICTORS if row[name] is not None}
    return {name: value for name, value in (row | percents).items() if name not in HIDDEN}


def errors(values: pd.Series) -> dict:
    """Return how far off a predictor is over some cells."""
    off = values.dropna().abs()
    counts = {"cells": len(off), "over 1 %": int((off > GOAL).sum())}
    return counts | {"median": f"{off.median():.2%}", "worst": f"{off.max():.2%}"}


def scored(loaded: Runs, tracker: bool = False) -> list[dict]:
    """Return a row for each finished run whose memory is known by component. stderr names the others, with reasons."""
    sys.stderr.write("".join(f"set aside: {sentence}\n" for sentence in loaded.set_aside))
    rows = []
    for run in sorted(loaded.done, key=lambda run: run.folder):
        if reason := left_out(run):
            sys.stderr.write(f"left out: {run.folder}: {reason}\n")
        else:
            rows.append(score(run, tracker))
    if not rows:
        raise Stop("no finished run has memory by component and a known model", "run study sweep scoreboard first")
    return rows


def left_out(run: Run) -> str | None:
    """Return the reason why a finished run has no row; None if it has one."""
    record = run.record
    shape = shape_of(run.record.requested.model or "")
    if record.is_script or record.is_watched:
        return "it ran a script that is not ours"
    if not metrics.components(run.record):
        return "its memory is not known by component"
    if shape not in SHAPES:
        return f"{record.requested.model} is no built-in shape, and a record does not keep a model's config"
    if architecture(record) is None:
        return f"it trained another model than the built-in {shape}: the parameters differ"
    if predicted(record) is None:
        return "its memory is not predicted: a compiled run, fp8, or data of unknown size"
    return None


def score(run: Run, tracker: bool = False) -> dict:
    """Return one run's peak, and the relative error of each prediction of it; None where a predictor has none."""
    record = run.record
    rank = run.record.memory.components.per_rank[0]
    ours = cast(Estimate, predicted(record))  # left_out has looked for a prediction
    measured_bytes = rank.tracked_peak_bytes
    at_peak = rank.at_peak or {}
    family = SHAPES[shape_of(run.record.requested.model or "")]["model_type"]
    bytes_of = {"ours": ours.peak_bytes, "torch": None} | library_estimates(run)
    if tracker and fsdp_tracker.applies(record):
        bytes_of["torch"] = fsdp_tracker.peak_bytes(record)
    off = {name: None if bytes_of[name] is None else bytes_of[name] / measured_bytes - 1 for name in PREDICTORS}
    states_bytes = sum(at_peak.get(role, 0) for role in ESTIMATED)
    missed = {part: ours.at_peak.get(part, 0) - at_peak.get(part, 0) for part in [*at_peak, *ours.at_peak]}
    worst = max(missed, key=lambda part: abs(missed[part]))
    return {
        "cell": f"{run.record.requested.model} {run.record.arm}",
        "family": family,
        "arm": run.record.arm,
        "ranks": f"{run.record.observed.ranks} virtual" if run.record.is_virtual else run.record.observed.ranks,
        "precision": run.record.requested.precision,
        "rows": run.record.requested.micro_batch,
        "acc": run.record.requested.accumulation,
        "tokens": run.record.requested.sequence,
        "held out": bool(record.cell.part and record.cell.part.startswith(HELD_OUT)),
        "measured GB": measured_bytes / 1e9,
        **off,
        STATES_ONLY: bytes_of["deepspeed"] and bytes_of["deepspeed"] / states_bytes - 1,
        "most off": f"{worst} {missed[worst] / measured_bytes:+.1%}",
    }


def library_estimates(run: Run) -> dict:
    """Return what the libraries' own estimators give. None of them includes activations."""
    model = cast(Transformer, architecture(run.record))
    sizes = [tensor.elements for tensor in model.tensors]
    observed = run.record.observed
    homes = (observed.offload_optimizer, observed.offload_param)
    ranks = observed.ranks or 1
    states = deepspeed_bytes(sizes, observed.stage, ranks, ranks, homes)
    on_host = states[1] / ranks if states and homes[0] != "none" else 0  # on a CPU both are one memory
    usage = accelerate_bytes(sum(sizes), run.record.requested.precision)
    return {"deepspeed": states and states[0] + on_host, "accelerate": usage}


def measured_on_gpu(runs: Runs) -> pd.DataFrame:
    """Return our own runs on a GPU: what each measured, what was predicted, and predicted over measured."""
    rows = []
    for run in runs.done:
        training = training_of(run.record) if run.record.observed.device == "cuda" else None
        for quantity, measured, expected in _of_run(run, training) if training else ():
            about = {name: run.facts[name] for name in ("model", "arm", "ranks", "kind")} | {"quantity": quantity}
            about |= {"measured": measured, "predicted": expected}
            rows.append(about | {"predicted over measured": expected / measured})
    return pd.DataFrame(rows)


def _of_run(run: Run, training: Training) -> Iterator[tuple[str, float, float]]:
    """Give what a run measured and has a prediction of. A virtual rank has no NCCL, and sends nothing."""
    gpu = None
    with suppress(Stop, IndexError):
        gpu = GPUS[gpu_named(run.record.hardware.devices[0].name)]
    kinds = memory_kinds(training, gpu)
    for kind, field in FIELDS.items():
        measured = max((getattr(rank, field) or 0 for rank in run.record.memory.per_rank), default=0)
        expected = getattr(kinds, kind)
        if measured and expected and not (kind == "driver" and run.record.is_virtual):
            yield kind, measured, expected
    if (
        gpu
        and metrics.value(run.record, "step_s")
        and not run.record.is_virtual
        and run.record.observed.offload_optimizer != "nvme"
    ):
        of_a_node = max((len(machine.ranks) for machine in run.record.machines), default=run.record.observed.ranks or 1)
        yield (
            "step",
            metrics.value(run.record, "step_s"),
            step_time(training, Hardware(gpu=gpu, gpus_per_node=of_a_node)).seconds,
        )


if __name__ == "__main__":
    with exit_on_stop():
        answer = parsed(main, prog="python benchmarks/scoreboard.py")
    if answer is not None:
        say(json.dumps(answer, indent=1, default=str))
