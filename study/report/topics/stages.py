"""What a stage does, for learners: the records beside a calculation by hand, and a figure that a reader can drag."""

import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from study.records import metrics
from study.records.runs import Runs
from study.report import style

ARMS = ("ddp", "zero1", "zero2", "zero3")
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


def train(folder: str) -> None:
    """Train the four arms on two ranks now, in about a minute."""
    for arm in ARMS:
        words = ["sweep", "smoke", "--only", "part=arms", "task=wikitext", f"arm={arm}", "--runs", folder]
        subprocess.run([sys.executable, "-m", "study.cli", *words], check=True)


def recorded(runs: Runs) -> dict[str, dict[str, float]]:
    """Return by arm a rank's bytes a parameter: states after a step, gradients at the peak, collectives of a step."""
    found: dict[str, dict[str, float]] = {}
    for run in runs.select(arm=list(ARMS)).done:
        sizes = metrics.sent(run.record)
        for first_rank in run.record.memory.components.per_rank[:1]:
            sizes |= first_rank.after_step
            sizes["gradients"] = (first_rank.at_peak or {}).get("gradients", 0)
        each = {
            part: round(size_bytes / (run.record.observed.parameters or 1), 3) for part, size_bytes in sizes.items()
        }
        found.setdefault(run.record.arm, each)  # of repeats the first: they hold and send the same
    return found


def beside(runs: Runs, by_hand: Mapping[str, Mapping[str, float]], parts: Iterable[str]) -> pd.DataFrame:
    """Return the recorded bytes a parameter of some parts, each right of what was computed by hand."""
    rows = []
    for arm, sizes in recorded(runs).items():
        row: dict[str, float | str] = {"arm": arm}
        for part in parts:
            if part in by_hand[arm]:
                row[f"{part} by hand"] = by_hand[arm][part]
            row[f"{part} at the peak" if part == "gradients" else part] = sizes.get(part, 0)
        rows.append(row)
    return pd.DataFrame(rows)


def sent(runs: Runs, times: Mapping[str, float]) -> pd.DataFrame:
    """Return what a step sends in bytes a parameter, and how many times DDP's: by the paper's count, and recorded."""
    rows = pd.DataFrame(
        [{"arm": arm} | {kind: of.get(kind, 0) for kind in COLLECTIVES} for arm, of in recorded(runs).items()]
    )
    if len(rows):
        rows["over DDP, paper"] = [times[arm] / times["ddp"] for arm in rows["arm"]]
        total = 2 * rows["all_reduce"] + rows["reduce_scatter"] + rows["all_gather"]
        rows["over DDP, counted"] = total / total[rows["arm"] == "ddp"].iloc[0]
    return rows
