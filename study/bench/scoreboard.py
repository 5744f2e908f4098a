"""Compares predictions of peak memory with measured peaks: ours, DeepSpeed's, Accelerate's and PyTorch's.

study scoreboard runs/scoreboard runs/smoke
"""

import statistics
import sys
from pathlib import Path
from typing import Annotated

import tyro
from accelerate.commands.estimate import estimate_training_usage
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

from study.bench import fsdp_tracker, gpu_scores
from study.bench.prediction import architecture, predicted
from study.errors import Stop
from study.io.tables import say, show
from study.predictor.architecture import FAMILIES, tensors
from study.records import runs
from study.records.runs import Run, Runs
from study.spec.shapes import SHAPES, shape_of

HELD_OUT = "held-out"  # parts of the protocol that no constant was derived from
# "ours" looks at the model; "formulas" is the second way, for the families that have them.
# PyTorch's FSDPMemTracker follows FSDP2, and stands beside stage 3 without offloading, the arm that is most like it.
PREDICTORS = ("ours", "formulas", "deepspeed", "accelerate", "torch")
STATES_ONLY = "deepspeed, states"
ESTIMATED = ("weights", "master", "moments", "gradients", "buckets")  # all that DeepSpeed's estimators predict
GOAL = 0.01


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
        folders: Folders with runs in them, at any depth; - reads them from standard input, one per line.
        every_cell: Print each cell, not only those that ours misses by more than 1 %.
        tracker: Ask PyTorch's FSDPMemTracker as well, which takes some seconds for a cell of stage 3.
        as_json: Print the rows as JSON instead.
    """
    if not folders:
        raise Stop("no folder is given", "name folders with runs, as in: study scoreboard runs/scoreboard")
    if folders == (Path("-"),):
        folders = tuple(map(Path, sys.stdin.read().splitlines()))
    loaded = runs.load(folders, every_folder_has_runs=True)
    rows = scored(loaded, tracker)
    if as_json:
        return rows
    chosen = [dict(row) for row in rows if every_cell or abs(row["ours"]) > GOAL]
    if chosen:
        percents = (*PREDICTORS, STATES_ONLY)
        shown = [
            row | {name: None if row[name] is None else f"{row[name]:+.1%}" for name in percents} for row in chosen
        ]
        show([{name: value for name, value in row.items() if name not in HIDDEN} for row in shown])
    held_out = [row for row in rows if row["held out"]]
    show(
        [
            {"predictor": name} | errors(part, name, title)
            for title, part in (("all", rows), ("held out", held_out))
            for name in (*PREDICTORS, STATES_ONLY)
            if any(row[name] is not None for row in part)
        ]
    )
    for by in ("family", "arm"):
        names = sorted({row[by] for row in rows})
        show([{by: name} | errors([row for row in rows if row[by] == name], "ours") for name in names])
    if on_gpu := gpu_scores.scored(loaded):
        say("", "On the GPU: what was measured, and how far off the prediction is.")
        show(gpu_scores.lines(on_gpu))
        say("")
        show(gpu_scores.errors(on_gpu))


HIDDEN = ("family", "arm", "held out", "acc", STATES_ONLY)  # columns for JSON alone: a line has 100 characters


def errors(rows: list[dict], predictor: str, title: str | None = None) -> dict:
    """How far off a predictor is over some cells."""
    off = [abs(row[predictor]) for row in rows if row[predictor] is not None]
    over = sum(error > GOAL for error in off)
    counts = {"cells": len(off), "over 1 %": over}
    names = {"of": title} if title else {}
    return names | counts | {"median": f"{statistics.median(off):.2%}", "worst": f"{max(off):.2%}"}


def scored(loaded: Runs, tracker: bool = False) -> list[dict]:
    """A row for each finished run whose memory is known by component. stderr names the others, with reasons."""
    sys.stderr.write("".join(f"set aside: {sentence}\n" for sentence in loaded.set_aside))
    in_order = sorted(loaded.done, key=lambda run: run.folder)
    reasons = {run.folder: left_out(run) for run in in_order}
    sys.stderr.write("".join(f"left out: {folder}: {reason}\n" for folder, reason in reasons.items() if reason))
    rows = [score(run, tracker) for run in in_order if reasons[run.folder] is None]
    if not rows:
        raise Stop("no finished run has memory by component and a known model", "run study sweep scoreboard first")
    return rows


def left_out(run: Run) -> str | None:
    """Return the reason why a finished run has no row; None if it has one."""
    record = run.record
    if record.is_script or record.is_watched:
        return "it ran a script that is not ours"
    if not run.components:
        return "its memory is not known by component"
    if shape_of(record.requested.model) not in SHAPES:
        return f"{record.requested.model} is no built-in shape, and a record does not keep a model's config"
    if architecture(record) is None:
        return f"it trained another model than the built-in {shape_of(record.requested.model)}: the parameters differ"
    if predicted(record) is None:
        return "its memory is not predicted: a compiled run, fp8, or data of unknown size"
    return None


def score(run: Run, tracker: bool = False) -> dict:
    """One run's peak, and the relative error of each prediction of it; None where a predictor has none."""
    rank, ours = run.record.memory.components.per_rank[0], predicted(run.record, look=True)
    measured_bytes, at_peak = rank.tracked_peak_bytes, rank.at_peak
    bytes_of = {"ours": ours.peak_bytes, "formulas": None} | library_estimates(run)
    if (family := SHAPES[shape_of(run.model)]["model_type"]) in FAMILIES:
        bytes_of["formulas"] = predicted(run.record).peak_bytes
    asked_torch = tracker and fsdp_tracker.applies(run.record)
    bytes_of["torch"] = fsdp_tracker.peak_bytes(run.record) if asked_torch else None
    states_bytes = sum(at_peak.get(role, 0) for role in ESTIMATED)
    off = {part: ours.at_peak.get(part, 0) - at_peak.get(part, 0) for part in [*at_peak, *ours.at_peak]}
    worst = max(off, key=lambda part: abs(off[part]))
    return {
        "cell": f"{run.model} {run.arm}",
        "family": family,
        "arm": run.arm,
        "ranks": f"{run.ranks} virtual" if run.virtual else run.ranks,
        "precision": run.precision,
        "rows": run.micro_batch,
        "acc": run.accumulation,
        "tokens": run.sequence,
        "held out": (run.record.cell.part or "").startswith(HELD_OUT),
        "measured GB": measured_bytes / 1e9,
        **{name: None if bytes_of[name] is None else bytes_of[name] / measured_bytes - 1 for name in PREDICTORS},
        STATES_ONLY: bytes_of["deepspeed"] and bytes_of["deepspeed"] / states_bytes - 1,
        "most off": f"{worst} {off[worst] / measured_bytes:+.1%}",
    }


def library_estimates(run: Run) -> dict[str, float | None]:
    """What the libraries' own estimators return. None of them includes activations."""
    sizes, seen = [tensor.elements for tensor in tensors(architecture(run.record))], run.record.observed
    on_host = seen.offload_optimizer != "none"
    options = {"cpu_offload": on_host, "additional_buffer_factor": 1}
    deepspeed = None  # it has none for DDP and stage 1
    if run.stage in (2, 3):
        if run.stage == 2:
            host, device = estimate_zero2_model_states_mem_needs(sum(sizes), run.ranks, 1, **options)
        else:
            options["cpu_offload_params"] = seen.offload_param != "none"
            host, device, _ = estimate_zero3_model_states_mem_needs(sum(sizes), max(sizes), run.ranks, 1, **options)
        deepspeed = device + (host / run.ranks if on_host else 0)  # on a CPU both are one memory
    usage = estimate_training_usage(4 * sum(sizes), "float32" if run.precision == "fp32" else "bfloat16")
    return {"deepspeed": deepspeed, "accelerate": max(usage.values())}  # it prints the largest
