"""A predicted step as a picture: one lane per stream."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from study.io.numbers import size
from study.predictor.architecture import named
from study.predictor.setup import Setup
from study.predictor.timing.replay import Span, as_rows
from study.predictor.timing.steptime import Machine, step_time
from study.report import style
from study.report.grouping import parts
from study.report.style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, WIDTH, WINE

DISK_BYTES_PER_S = 6e9  # of two good NVMe disks, where a disk is drawn

# By the first word of a task's name. Nothing is told apart by colour alone: lanes have names, and kinds their order.
KINDS = {
    "forward": BLUE,
    "backward": ORANGE,
    "update": GREEN,
    "all_gather": SKY,
    "reduce_scatter": PURPLE,
    "all_reduce": WINE,
}
OTHERS = GREY
UNSEEN = 1500  # of a step: a figure has some 600 dots across


def lanes(axes: Axes, spans: Sequence[dict]) -> dict[str, Patch]:
    """Draw spans as lanes, in the order of their first task, and return what the colours mean."""
    streams = list(dict.fromkeys(span["stream"] for span in spans))
    bars: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        word = span["task"].partition(" ")[0]
        label = word if word in KINDS else "moving states"
        bars[streams.index(span["stream"]), label].append((span["start s"], span["end s"] - span["start s"]))
    patches = {}
    unseen_s = max(span["end s"] for span in spans) / UNSEEN
    for (lane, label), places in bars.items():
        colour = KINDS.get(label, OTHERS)
        whole = _joined(places, unseen_s)
        axes.broken_barh(whole, (lane - 0.35, 0.7), color=colour, lw=0.4)  # the edge shows what is very short
        patches[label] = Patch(color=colour, label=label)
    axes.set_yticks(range(len(streams)), streams)
    axes.invert_yaxis()
    return patches


def _joined(places: list[tuple[float, float]], unseen_s: float) -> list[tuple[float, float]]:
    """Join neighbours without a visible gap: a step has a thousand tasks."""
    joined: list[tuple[float, float]] = []
    for start, length in sorted(places):
        if joined and start - sum(joined[-1]) < unseen_s:
            joined[-1] = (joined[-1][0], max(sum(joined[-1]), start + length) - joined[-1][0])
        else:
            joined.append((start, length))
    return joined


@style.figure
def draw(spans: Sequence[Span], title: str) -> Figure:
    """Return a predicted step as a figure."""
    shown = as_rows(spans)
    height = 0.7 + 0.45 * len({row["stream"] for row in shown})
    drawing = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = drawing.add_subplot()
    handles = list(lanes(axes, shown).values())
    axes.set_xlabel("seconds of a predicted step")
    axes.set_title(title, fontsize="small", color=INK, loc="left", wrap=True)
    drawing.legend(handles=handles, loc="outside lower center", ncols=3, fontsize="x-small", frameon=False)
    return drawing


def save(spans: Sequence[Span], title: str, path: Path) -> None:
    """Draw a predicted step to a file."""
    draw(spans, title).savefig(path)


def table() -> pd.DataFrame:
    """Return what runs when in a predicted step of GPT-2 XL on eight A100, under three arms: a row for each task."""
    machine = Machine(gpu="A100-80GB", disk_bytes_per_s=DISK_BYTES_PER_S)
    about = f"GPT-2 XL, 8 x A100 80GB, 8 rows of 1024 tokens each, a disk of {size(DISK_BYTES_PER_S)}/s"
    rows = []
    for arm in ("ddp", "zero3", "zero3_nvme"):
        setup = Setup.of_arm(
            named("gpt2-xl"), arm, ranks=8, precision="bf16_cast", micro_batch=8, sequence=1024, device="cuda"
        )
        rows += [{"setup": about, "arm": arm} | row for row in as_rows(step_time(setup, machine).timeline)]
    return pd.DataFrame(rows)


@style.figure
def figure(rows: pd.DataFrame) -> Figure:
    """A predicted step of each arm, one row for each stream."""
    arms = parts(rows, "arm")
    drawing, axes = style.panels([0.5 + 0.35 * mine["stream"].nunique() for mine in arms.values()])
    handles: dict[str, Patch] = {}
    for ax, (arm, mine) in zip(axes, arms.items(), strict=True):
        handles |= lanes(ax, mine.to_dict("records"))
        ax.set_title(f"{arm}: {mine['end s'].max():.2g} s in a step")
    axes[-1].set_xlabel("seconds since the step began")
    text = f"Predicted, not measured: {rows['setup'].iloc[0]}. Dependencies between tasks are not drawn."
    return style.finished(drawing, list(handles.values()), text)
