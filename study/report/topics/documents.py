"""What documents print, beside what was measured and predicted here; document 002's script; and the claims."""

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from study.ledger import texts
from study.predict.front import Setup, estimate, named
from study.records.runs import Runs
from study.report import style
from study.report.tables import parts
from study.report.topics import memory
from study.report.topics.losses import band

# Document 000: Gemma2-9B on eight H100, 2048 tokens, bfloat16, effective batch 144 unless said otherwise.
SETTING_000: dict[str, Any] = {"ranks": 8, "sequence": 2048, "precision": "bf16_cast", "micro_batch": 1}
MODEL_000, BATCH_000 = "gemma2-9b", 144
MEMORY_000 = {"ddp": 76e9, "zero2": 45e9, "zero3": 28e9}  # "Memory Utilization"
DOCUMENT = "the document"


def memory_000(runs: Runs) -> pd.DataFrame:
    """Return document 000's setting with activations kept and recomputed, measured and predicted; and its numbers."""
    shape = named(MODEL_000)
    more: dict[str, Any] = {"accumulation": BATCH_000 // SETTING_000["ranks"], "attention": "eager", "device": "cuda"}
    group = f"{MODEL_000}, 8 ranks, 2048 tokens, bf16_cast, activations kept or recomputed"
    rows: list[dict] = []
    for arm, printed_bytes in MEMORY_000.items():
        known = [run for run in runs.select(model=MODEL_000, arm=arm, **SETTING_000).done if memory.held_bytes(run)]
        for recompute, how in ((False, "kept"), (True, "recomputed")):
            place: dict[str, Any] = {"group": group, "panel": group, "line": f"{arm}, {how}", "arm": arm}
            place |= {"ranks": 8, "parameters": shape.parameters, "kind": "real"}
            # --- measured, if the runs are there
            if repeats := [run for run in known if bool(run.record.requested.checkpointing) == recompute]:
                run = max(repeats, key=memory.held_bytes)
                measured = {"measured": memory.held_parts(run)}
                rows += memory.stacks(place | {"kind": run.kind}, measured, len(repeats))
            # --- predicted, and printed: the document does not say whether it recomputes
            ours = estimate(Setup.of_arm(shape, arm, **SETTING_000, **more, checkpointing=recompute))
            others = {"predicted": memory.part_bytes(ours.at_peak), DOCUMENT: {"parts not given": printed_bytes}}
            rows += memory.stacks(place, others, 0)
    return pd.DataFrame(rows)


# --- document 002's own script -------------------------------------------------------------------------------------

REPAIRS = {"none": "as printed", "fresh_model": "with a fresh model", "engaged": "with DeepSpeed engaged"}
TRAININGS = {1: ("#1d1d1f", "-"), 2: ("#d55e00", "--"), 3: ("#56b4e9", ":")}  # they are not arms


def script(runs: Runs) -> pd.DataFrame:
    """Return each training of document 002's script, what it started from, and whether DeepSpeed was called."""
    rows: list[dict] = []
    for run in runs.select(arm="single").done:
        record = run.record
        every = record.observed.logging_steps or 1
        # The Trainer logs the mean of every so many steps, so a loss stands at the last of them.
        for number, training in enumerate(record.observed.runs, 1):
            about: dict[str, Any] = {
                "script": REPAIRS[record.requested.repair or "none"],
                "seed": record.requested.seed,
                "training": number,
                "name": training.name,
                "batch": training.batch,
                "weights_from": training.weights_from,
                "deepspeed_calls": training.deepspeed_initialize_calls,
            }
            rows += [about | {"step": window * every, "loss": loss} for window, loss in enumerate(training.losses, 1)]
    rows.sort(key=lambda row: list(REPAIRS.values()).index(row["script"]))
    return pd.DataFrame(rows)


def trainings(rows: pd.DataFrame) -> pd.DataFrame:
    """Return of each training of `script` from which weights it starts, and its first and last logged loss."""
    if rows.empty:
        return rows
    names = ["script", "training", "name", "weights_from", "deepspeed_calls"]
    # The first and the last loss of each seed, and then the median over seeds.
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
            tone, dash = TRAININGS[int(number)]
            band(ax, training, tone, linestyle=dash, marker="o", markersize=3.5)
            first = training.iloc[0]  # all rows of a training have its name
            marks[f"{number}: {first['name']}, batch {first['batch']}"] = {"color": tone, "linestyle": dash}
        ax.set_title(kind)
        ax.set_ylabel("loss (nats)")
    axes[-1].set_xlabel("optimizer step of each training")
    note = f"Points: mean loss of {rows['step'].min()} steps (n = {rows['seed'].nunique()} seeds)."
    return style.finished(drawing, style.keys(marks), f"{note} Bands: from the lowest to the highest seed.")


# --- claims --------------------------------------------------------------------------------------------------------


def claims(document: str = "", central: bool = False) -> pd.DataFrame:
    """Return the claims of a document, or of all; `central`: only those that a document stands for."""
    rows = [
        {
            "claim": each.id,
            "question": each.question,
            "verdict": each.outcome,
            "certainty": each.certainty or "",
            "found": each.found,
        }
        for each in texts.claims()
        if document in ("", each.document) and (each.central or not central)
    ]
    return pd.DataFrame(rows)
