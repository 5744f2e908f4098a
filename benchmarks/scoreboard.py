"""Compares predictions of peak memory with measured peaks: ours, DeepSpeed's, Accelerate's and PyTorch's.

python benchmarks/scoreboard.py runs/scoreboard runs/smoke

It prints each predictor's median and worst error, ours by family and by arm, and the cells that ours misses by more
than 1 %.
"""

import argparse
import sys
from pathlib import Path
from typing import cast

import fsdp_tracker
import pandas as pd
from accelerate.commands.estimate import estimate_training_usage

from study.core.errors import Stop, exit_on_stop
from study.core.shapes import SHAPES, shape_of
from study.core.text import show
from study.predict.estimate import Estimate
from study.predict.trace.transformer import Transformer
from study.records import metrics, runs
from study.records.runs import Run, Runs
from study.report.of_record import architecture, predicted

HELD_OUT = "held-out"  # parts of the protocol that no constant was derived from
# PyTorch's FSDPMemTracker follows FSDP2, and stands beside stage 3 without offloading, the arm that is most like it.
PREDICTORS = ("ours", "deepspeed", "accelerate", "torch")
STATES_ONLY = "deepspeed, states"
ESTIMATED = ("weights", "master", "moments", "gradients", "buckets")  # all that DeepSpeed's estimators predict
HIDDEN = ["family", "arm", "held out", "acc", STATES_ONLY]  # columns without room: a line has 100 characters
GOAL = 0.01


def main(folders: list[Path], every_cell: bool) -> None:
    table = pd.DataFrame(scored(runs.load(folders, every_folder_has_runs=True)))
    cells = table if every_cell else table[table["ours"].abs() > GOAL]
    percents = {name: cells[name].map("{:+.1%}".format, na_action="ignore") for name in PREDICTORS}
    show(cells.assign(**percents).drop(columns=HIDDEN).replace({float("nan"): None}).to_dict("records"))
    parts = {"all": table, "held out": table[table["held out"]]}
    names = [(part, name) for part in parts for name in (*PREDICTORS, STATES_ONLY) if parts[part][name].notna().any()]
    show([{"predictor": name, "of": part} | errors(parts[part][name]) for part, name in names])
    for by in ("family", "arm"):
        show([{by: name} | errors(group["ours"]) for name, group in table.groupby(by)])


def errors(values: pd.Series) -> dict:
    """Return how far off a predictor is over some cells."""
    off = values.dropna().abs()
    counts = {"cells": len(off), "over 1 %": int((off > GOAL).sum())}
    return counts | {"median": f"{off.median():.2%}", "worst": f"{off.max():.2%}"}


def scored(loaded: Runs) -> list[dict]:
    """Return a row for each finished run whose memory is known by component. stderr names the others, with reasons."""
    sys.stderr.write("".join(f"set aside: {sentence}\n" for sentence in loaded.set_aside))
    rows = []
    for run in sorted(loaded.done, key=lambda run: run.folder):
        if reason := left_out(run):
            sys.stderr.write(f"left out: {run.folder}: {reason}\n")
            continue
        theirs = library_estimates(run)
        if fsdp_tracker.applies(run.record):
            theirs["torch"] = fsdp_tracker.peak_bytes(run.record)
        rows.append(score(run, theirs))
    if not rows:
        raise Stop("no finished run has memory by component and a known model", "run study sweep scoreboard first")
    return rows


def left_out(run: Run) -> str | None:
    """Return the reason why a finished run has no row; None if it has one."""
    record = run.record
    shape = shape_of(record.requested.model or "")
    if record.is_script or record.is_watched:
        return "it ran a script that is not ours"
    if not metrics.components(record):
        return "its memory is not known by component"
    if shape not in SHAPES:
        return f"{record.requested.model} is no built-in shape, and a record does not keep a model's config"
    if architecture(record) is None:
        return f"it trained another model than the built-in {shape}: the parameters differ"
    if predicted(record) is None:
        return "its memory is not predicted: a compiled run, fp8, or data of unknown size"
    return None


def score(run: Run, theirs: dict[str, float | None]) -> dict:
    """Return one run's peak, and the relative error of each prediction of it; None where a predictor has none."""
    record, requested = run.record, run.record.requested
    rank = record.memory.components.per_rank[0]
    ours = cast(Estimate, predicted(record))  # left_out has looked for a prediction
    measured_bytes = rank.tracked_peak_bytes
    at_peak = rank.at_peak or {}
    bytes_of = {"ours": ours.peak_bytes} | theirs
    off: dict[str, float | None] = {}
    for name in PREDICTORS:
        expected = bytes_of[name]
        off[name] = None if expected is None else expected / measured_bytes - 1
    states_bytes = sum(at_peak.get(role, 0) for role in ESTIMATED)
    missed = {part: ours.at_peak.get(part, 0) - at_peak.get(part, 0) for part in [*at_peak, *ours.at_peak]}
    worst = max(missed, key=lambda part: abs(missed[part]))
    return {
        "cell": f"{requested.model} {record.arm}",
        "family": SHAPES[shape_of(requested.model or "")]["model_type"],
        "arm": record.arm,
        "ranks": f"{record.observed.ranks} virtual" if record.is_virtual else record.observed.ranks,
        "precision": requested.precision,
        "rows": requested.micro_batch,
        "acc": requested.accumulation,
        "tokens": requested.sequence,
        "held out": (record.cell.part or "").startswith(HELD_OUT),
        "measured GB": measured_bytes / 1e9,
        **off,
        STATES_ONLY: bytes_of["deepspeed"] and bytes_of["deepspeed"] / states_bytes - 1,
        "most off": f"{worst} {missed[worst] / measured_bytes:+.1%}",
    }


def library_estimates(run: Run) -> dict[str, float | None]:
    """Return what the libraries' own estimators give. None of them includes activations, and Accelerate's no sharding.

    Accelerate's is the largest number that `accelerate estimate-memory` prints for a training with Adam.
    """
    model = cast(Transformer, architecture(run.record))
    sizes = [tensor.elements for tensor in model.tensors]
    dtype = "float32" if run.record.requested.precision == "fp32" else "bfloat16"
    usage = estimate_training_usage(4 * sum(sizes), dtype)
    return {"deepspeed": deepspeed_bytes(run, sizes), "accelerate": max(usage.values()), "torch": None}


def deepspeed_bytes(run: Run, sizes: list[int]) -> float | None:
    """Return a rank's bytes by DeepSpeed, for the sizes of tensors; None without stage 2 or 3, which alone it knows."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs  # takes seconds
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    observed = run.record.observed
    ranks = observed.ranks or 1
    offloads = observed.offload_optimizer != "none"
    options = {"num_gpus_per_node": ranks, "additional_buffer_factor": 1, "cpu_offload": offloads}
    if observed.stage == 2:
        host_bytes, device_bytes = estimate_zero2_model_states_mem_needs(sum(sizes), **options)
    elif observed.stage == 3:
        options["cpu_offload_params"] = observed.offload_param != "none"
        host_bytes, device_bytes, _ = estimate_zero3_model_states_mem_needs(sum(sizes), max(sizes), **options)
    else:
        return None
    return device_bytes + (host_bytes / ranks if offloads else 0)  # on a CPU both are one memory


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="folders with runs in them, at any depth")
    parser.add_argument("--every-cell", action="store_true", help="print all cells")
    options = parser.parse_args()
    with exit_on_stop():
        main(options.folders, options.every_cell)
