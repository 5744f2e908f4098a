"""Tables that documents print, and beside them what was measured and predicted here; and document 002's script."""

import statistics
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from study.predict.front import Setup, estimate, named
from study.records import metrics
from study.records.groups import groups, lines
from study.records.runs import Runs
from study.report import style
from study.report.grouping import parts
from study.report.style import FAINT, INK
from study.report.topics import memory
from study.report.topics.losses import band
from study.report.topics.speed import seconds

# Document 000: Gemma2-9B on eight H100, 2048 tokens, bfloat16, effective batch 144 unless said otherwise.
SETTING_000: dict[str, Any] = {"ranks": 8, "sequence": 2048, "precision": "bf16_cast", "micro_batch": 1}
MODEL_000, BATCH_000 = "gemma2-9b", 144
MEMORY_000 = {"ddp": 76e9, "zero2": 45e9, "zero3": 28e9}  # "Memory Utilization"
TOKENS_PER_S_AND_GPU_000 = {"ddp": 2847, "zero2": 2698, "zero3": 2234}  # "Training Throughput"
STEPS_PER_HOUR_000 = {"ddp": 385, "zero2": 365, "zero3": 302}
# Document 001: "Overcoming Bottlenecks", 20 billion parameters on eight GPUs.
GROUP_001 = "document 001, 20B on eight GPUs"
OFFLOAD_001: tuple[dict, ...] = (
    {"group": GROUP_001, "arm": "ddp", "outcome": "OOM", "peak_bytes": 48e9, "samples_per_s": None},
    {"group": GROUP_001, "arm": "zero3_cpu", "outcome": "done", "peak_bytes": 12e9, "samples_per_s": 1200},
    {"group": GROUP_001, "arm": "zero3_nvme", "outcome": "done", "peak_bytes": 8e9, "samples_per_s": 950},
)
ARMS_001 = ["single", "ddp", "zero3", "zero3_cpu", "zero3_nvme"]
# Document 003: scenarios 1 to 3, four GPUs, a model whose weights take 4 GB; read as 10^9 parameters in fp32.
RANKS_003, PARAMETERS_003 = 4, 1e9
MEMORY_003 = {
    "zero1": {"weights": 4e9, "gradients": 4e9, "optimizer": 1e9},
    "zero2": {"weights": 4e9, "gradients": 1e9, "optimizer": 1e9},  # and, a sentence later, "approximately 5 GB"
    "zero3": {"weights": 1e9, "gradients": 1e9, "optimizer": 1e9},
}
DOCUMENT = "the document"


def memory_000(runs: Runs) -> pd.DataFrame:
    """Return document 000's setting with activations kept and recomputed, measured and predicted; and its numbers."""
    shape = named(MODEL_000)
    more: dict[str, Any] = {"accumulation": BATCH_000 // SETTING_000["ranks"], "attention": "eager", "device": "cuda"}
    group = f"{MODEL_000}, 8 ranks, 2048 tokens, bf16_cast, activations kept or recomputed"
    rows: list[dict] = []
    for arm, printed_bytes in MEMORY_000.items():
        measured = [
            run for run in runs.select(model=MODEL_000, arm=arm, **SETTING_000).done if metrics.components(run.record)
        ]
        for recompute, how in ((False, "kept"), (True, "recomputed")):
            place: dict[str, Any] = {"group": group, "panel": group, "line": f"{arm}, {how}", "arm": arm}
            place |= {"ranks": 8, "parameters": shape.parameters, "kind": "real"}
            if repeats := [run for run in measured if bool(run.record.requested.checkpointing) == recompute]:
                run = max(repeats, key=memory.held_bytes)
                bytes_by_part = memory.part_bytes(metrics.components(run.record))
                rows += memory.stack(place | {"kind": run.kind}, "measured", bytes_by_part, len(repeats))
            ours = estimate(Setup.of_arm(shape, arm, **SETTING_000, **more, checkpointing=recompute))
            rows += memory.stack(place, "predicted", memory.part_bytes(ours.at_peak))
            rows += memory.stack(place, DOCUMENT, {"parts not given": printed_bytes})
    return pd.DataFrame(rows)


def memory_003(runs: Runs) -> pd.DataFrame:
    """Return what each stage holds on four ranks, measured, and as document 003 says."""
    rows = memory.table(runs)
    if rows.empty:
        return rows
    rows = rows[(rows["ranks"] == RANKS_003) & rows["arm"].isin(["ddp", *MEMORY_003]) & rows["parameters"].notna()]
    printed = []
    for group in rows[rows["source"] == "measured"]["group"].unique():
        for arm, bytes_by_part in MEMORY_003.items():
            place = {"group": group, "panel": group, "line": arm, "arm": arm, "ranks": RANKS_003, "kind": "real"}
            printed += memory.stack(place | {"parameters": PARAMETERS_003}, DOCUMENT, bytes_by_part)
    return pd.concat([rows[rows["source"] != "predicted"], pd.DataFrame(printed)], ignore_index=True)


def throughput_000() -> pd.DataFrame:
    """Return document 000's table of speeds, and the steps per hour that follow from its tokens."""
    rows = []
    for arm, speed in TOKENS_PER_S_AND_GPU_000.items():
        row = {"arm": arm, "tokens_per_s_and_gpu": speed, "over_ddp": speed / TOKENS_PER_S_AND_GPU_000["ddp"]}
        tokens = BATCH_000 * SETTING_000["sequence"]
        row |= {"steps_per_hour": STEPS_PER_HOUR_000[arm]}
        rows.append(row | {"steps_per_hour_by_its_tokens": 3600 * speed * SETTING_000["ranks"] / tokens})
    return pd.DataFrame(rows)


def offload_001(runs: Runs) -> pd.DataFrame:
    """Return document 001's table, and our runs of its arms, however they ended."""
    rows = [*OFFLOAD_001]
    for group, members in groups(runs.select(arm=ARMS_001)).items():
        with_disk = any(run.record.arm == "zero3_nvme" for run in members)
        for line, mine in lines(members).items() if with_disk else ():
            run = mine[0]
            times = seconds(run for run in mine if run.record.observed.device == "cuda")
            row: dict[str, Any] = {"group": group, "arm": line, "ranks": run.record.observed.ranks, "n": len(mine)}
            row["peak_bytes"] = None if memory.has_one_memory(run) else metrics.peak_bytes(run.record)
            row["outcome"] = ", ".join(sorted({each.record.status for each in mine}))
            if times and run.record.observed.rows_per_step:
                row["samples_per_s"] = run.record.observed.rows_per_step / statistics.median(times)
            rows.append(row)
    return pd.DataFrame(rows)


# --- document 002's own script -------------------------------------------------------------------------------------

REPAIRS = {"none": "as printed", "fresh_model": "with a fresh model", "engaged": "with DeepSpeed engaged"}
TRAININGS = {1: (INK, "-"), 2: (style.VERMILION, "--"), 3: (style.SKY, ":")}  # they are not arms


def script(runs: Runs) -> pd.DataFrame:
    """Return each training of document 002's script, what it started from, and whether DeepSpeed was called."""
    rows: list[dict] = []
    for run in runs.select(arm="single").done:
        for number, training in enumerate(run.record.observed.runs, 1):
            about: dict[str, Any] = {
                "script": REPAIRS[run.record.requested.repair or "none"],
                "seed": run.record.requested.seed,
            }
            about |= {"training": number, "name": training.name, "batch": training.batch}
            about |= {"weights_from": training.weights_from, "deepspeed_calls": training.deepspeed_initialize_calls}
            every = run.record.observed.logging_steps or 1
            rows += [about | {"step": window * every, "loss": loss} for window, loss in enumerate(training.losses, 1)]
    if not rows:
        return pd.DataFrame()
    order = list(REPAIRS.values())
    return pd.DataFrame(rows).sort_values("script", key=lambda column: column.map(order.index), kind="stable")


def trainings(rows: pd.DataFrame) -> pd.DataFrame:
    """Return of each training of `script` from which weights it starts, and its first and last logged loss."""
    if rows.empty:
        return rows
    names = ["script", "training", "name", "weights_from", "deepspeed_calls"]
    of_seed = rows.groupby([*names, "seed"], sort=False)["loss"].agg(first_loss="first", last_loss="last")
    return of_seed.groupby(names, sort=False).median().reset_index()


@style.figure
def figure_of_script(rows: pd.DataFrame) -> Figure:
    """Losses of the trainings in document 002's script: as printed, with a fresh model, and with DeepSpeed engaged."""
    kinds = parts(rows, "script")
    drawing, axes = style.panels([1.6] * len(kinds), sharex=True, sharey=True)
    marks: dict[str, style.Look] = {}
    for ax, (kind, mine) in zip(axes, kinds.items(), strict=True):
        for number, training in parts(mine, "training").items():
            tone, dash = TRAININGS.get(int(number), (FAINT, "-"))
            band(ax, training, tone, linestyle=dash, marker="o", markersize=3.5)
            first = training.iloc[0]
            marks[f"{number}: {first['name']}, batch {first['batch']}"] = {"color": tone, "linestyle": dash}
        ax.set_title(kind)
        ax.set_ylabel("loss (nats)")
    axes[-1].set_xlabel("optimizer step of each training")
    note = f"Points: mean loss of {rows['step'].min()} steps (n = {rows['seed'].nunique()} seeds)."
    return style.finished(drawing, style.keys([], marks), f"{note} Bands: from the lowest to the highest seed.")
