"""What a stage does, for learners: the records beside a calculation by hand, and a figure that a reader can drag."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from study.records import metrics
from study.records.runs import Runs
from study.report import style

ARMS = ("ddp", "zero1", "zero2", "zero3")
STATES = ("weights", "master", "moments")  # what is there after each step; gradients come and go
AT_PEAK = "gradients at the peak"
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
TINY = {"task": "wikitext", "model": "gpt-tiny", "ranks": 2, "virtual": False, "precision": "fp32"}
ALL_TRAIN = {"lora_rank": None, "train_only": None}  # states of adapters are few bytes of many parameters
SMALL = TINY | ALL_TRAIN | {"accumulation": 1}
DRAG = Path(__file__).parents[1] / "templates" / "drag.html"  # what each rank holds, by stage, ranks and model
# Gradients are there at the peak with a second micro-batch or with recomputing: otherwise it often is before the first.
LARGE = ALL_TRAIN | {"model": "llama3-8b", "ranks": 8, "virtual": True, "precision": "bf16_cast", "checkpointing": True}
PASSES = TINY | ALL_TRAIN | {"accumulation": 4}


# Of the model states in 16 bits with Adam: the bytes of a parameter, the stage from which ranks divide them, and the
# colour that the drawing with sliders has.
HELD = {
    "weights": (2, 3, "#0072b2"),
    "gradients": (2, 2, "#f0e442"),
    "master copy": (4, 1, "#009e73"),
    "moments": (8, 1, "#7fceb9"),
}
RANKS = 4  # that are drawn


def drag() -> dict[str, str]:
    """Return the drawing with sliders, with a picture for readers that run no script."""
    still = style.png(held())
    return {
        "text/html": DRAG.read_text(encoding="utf-8"),
        "image/png": still,
        "text/plain": "What each of four ranks holds, by stage",
    }


@style.figure
def held() -> Figure:
    """What each of four ranks holds, by stage: filled is what it holds, empty is on other ranks."""
    drawing = Figure(figsize=(6.4, 4.4), layout="constrained")
    for stage, axes in enumerate(drawing.subplots(2, 2).flat):
        total = 0.0
        left = 0
        for part, (size_bytes, divided_from, colour) in HELD.items():
            share_bytes = size_bytes / RANKS if stage >= divided_from else size_bytes
            for rank in range(RANKS):
                begin = left + rank * share_bytes if stage >= divided_from else left
                axes.barh(rank, share_bytes, left=begin, color=colour, label=part if rank == 0 else None)
                axes.barh(rank, size_bytes, left=left, fill=False, **style.EDGE)
            left += size_bytes
            total += share_bytes
        axes.set_title(f"{f'stage {stage}' if stage else 'DDP'}: {total:g} bytes a parameter")
        axes.set_xticks([])
        style.name_bars(axes, [f"rank {rank}" for rank in range(RANKS)])
    drawing.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(HELD))
    return drawing


def recorded(runs: Runs, parts: Iterable[str]) -> pd.DataFrame:
    """Return one run of each arm, with the bytes a parameter of some parts of a step: states, or collectives."""
    rows: dict[str, dict[str, Any]] = {}
    for run in runs.select(arm=list(ARMS)).done:
        observed = run.record.observed
        sizes = metrics.sent(run.record)
        for first_rank in run.record.memory.components.per_rank[:1]:
            sizes |= first_rank.after_step
            sizes[AT_PEAK] = (first_rank.at_peak or {}).get("gradients", 0)
        row: dict[str, Any] = {"arm": run.record.arm}
        row |= {part: round(sizes.get(part, 0) / (observed.parameters or 1), 3) for part in parts}
        # Of repeats the first: they hold and send the same.
        rows.setdefault(run.record.arm, row | {"parameters": observed.parameters, "run": run.record.run_id})
    return pd.DataFrame(rows.values())
