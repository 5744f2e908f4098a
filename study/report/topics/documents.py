"""What documents print, beside what was measured and predicted here; document 002's script; and the claims."""

import math
from typing import Any

import pandas as pd

from study.core.arms import load_arm
from study.core.recipes import RECIPES
from study.ledger import texts
from study.predict.front import Batch, Placement, Recomputation, Training, estimate, named
from study.records.runs import Runs
from study.report.tables import stacked
from study.report.topics import memory

# Document 000: Gemma2-9B on eight H100, 2048 tokens, bfloat16, effective batch 144 unless said otherwise.
SETTING_000: dict[str, Any] = {"ranks": 8, "sequence": 2048, "precision": "bf16_cast", "micro_batch": 1}
MODEL_000, BATCH_000 = "gemma2-9b", 144
MEMORY_000 = {"ddp": 76e9, "zero2": 45e9, "zero3": 28e9}  # "Memory Utilization"
RECOMPUTES: dict[str, tuple[bool | None, ...]] = {"kept": (False, None), "recomputed": (True,)}  # values of records


def memory_000(runs: Runs) -> pd.DataFrame:
    """Return document 000's setting with activations kept and recomputed, measured and predicted; and its numbers."""
    shape = named(MODEL_000)
    passes = BATCH_000 // SETTING_000["ranks"]
    group = f"{MODEL_000}, 8 ranks, 2048 tokens, bf16_cast, activations kept or recomputed"
    rows: list[dict] = []
    for arm, printed in MEMORY_000.items():
        for how, recomputes in RECOMPUTES.items():
            place = {"group": group, "panel": group, "line": f"{arm}, {how}", "arm": arm, "kind": "real"}
            sources: dict[str, dict[str, float]] = {}
            # --- measured, if the runs are there
            repeats = runs.select(model=MODEL_000, arm=arm, checkpointing=recomputes, **SETTING_000).done
            if run := max(filter(memory.held_bytes, repeats), key=memory.held_bytes, default=None):
                place["kind"] = run.kind
                sources["measured"] = memory.held_parts(run)
            # --- predicted, and printed: the document does not say whether it recomputes
            batch = Batch(1, passes, SETTING_000["sequence"], Recomputation(recomputes[0]))
            placement = Placement.of(load_arm(arm), SETTING_000["ranks"], "cuda")
            recipe = RECIPES[SETTING_000["precision"]]
            ours = estimate(Training(shape, recipe, batch, placement, attention="eager"))
            sources |= {
                "predicted": memory.part_bytes(ours.at_peak),
                "the document": {"parts not given": printed},
            }
            rows += stacked(place, "bytes", sources)
    return pd.DataFrame(rows)


# --- document 002's own script -------------------------------------------------------------------------------------

REPAIRS = {"none": "as printed", "fresh_model": "with a fresh model", "engaged": "with DeepSpeed engaged"}


def script(runs: Runs) -> pd.DataFrame:
    """Return each training of document 002's script, as if it were an arm, and whether DeepSpeed was called."""
    rows: list[dict] = []
    for run in runs.select(arm="single").done:
        record = run.record
        every = record.observed.logging_steps or 1
        # The Trainer logs the mean of every so many steps, so a loss stands at the last of them.
        for number, training in enumerate(record.observed.runs, 1):
            name = f"training {number}"
            about: dict[str, Any] = {
                "group": REPAIRS[record.requested.repair or "none"],
                "line": name,
                "arm": name,
                "against": None,
                "difference": math.nan,
                "seed": record.requested.seed,
            }
            about |= training.model_dump(include={"name", "batch", "weights_from", "deepspeed_initialize_calls"})
            rows += [about | {"step": window * every, "loss": loss} for window, loss in enumerate(training.losses, 1)]
    rows.sort(key=lambda row: [*REPAIRS.values()].index(row["group"]))
    return pd.DataFrame(rows)


def trainings(rows: pd.DataFrame) -> pd.DataFrame:
    """Return of each training of `script` from which weights it starts, and its first and last logged loss."""
    if rows.empty:
        return rows
    names = ["group", "line", "name", "batch", "weights_from", "deepspeed_initialize_calls"]
    # The first and the last loss of each seed, and then the median over seeds.
    of_seed = rows.groupby([*names, "seed"], sort=False)["loss"].agg(first_loss="first", last_loss="last")
    return of_seed.groupby(names, sort=False).median().reset_index()


# --- claims --------------------------------------------------------------------------------------------------------


def claims() -> pd.DataFrame:
    names = ("id", "document", "central", "question", "outcome", "certainty", "found")
    return pd.DataFrame([{name: getattr(each, name) for name in names} for each in texts.claims()])
