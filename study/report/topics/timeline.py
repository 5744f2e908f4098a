"""A predicted step as a picture: one lane per stream."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from study.io.numbers import size
from study.predictor.architecture import named
from study.predictor.setup import Setup
from study.predictor.timing.replay import Span
from study.predictor.timing.steptime import Machine, step_time
from study.report import style
from study.report.grouping import parts
from study.report.style import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, WINE

DISK_BYTES_PER_S = 6e9  # of two good NVMe disks, where a disk is drawn

# By the first word of a task's name. Nothing is told apart by colour alone: lanes have names, and kinds their order.
KINDS = {"forward": BLUE, "backward": ORANGE, "update": GREEN}
KINDS |= {"all_gather": SKY, "reduce_scatter": PURPLE, "all_reduce": WINE}
OTHERS = ("moving states", GREY)
UNSEEN = 1500  # of a step: a figure has some 600 dots across


def _rows(spans: Sequence[Span]) -> list[dict]:
    """Return the spans that take time, as rows of a table."""
    return [
        {"stream": span.task.stream, "task": span.task.name, "start s": span.start_s, "end s": span.end_s}
        for span in spans
        if span.end_s > span.start_s
    ]


def lanes(axes: Axes, rows: pd.DataFrame) -> dict[str, Patch]:
    """Draw spans as lanes, in the order of their first task, and return what the colours mean."""
    words = rows["task"].str.partition(" ")[0]
    kinds = words.where(words.isin(KINDS), OTHERS[0])
    streams = list(rows["stream"].unique())
    patches = {}
    for (stream, kind), mine in rows.assign(kind=kinds).groupby(["stream", "kind"], sort=False):
        kind = str(kind)
        colour = KINDS.get(kind, OTHERS[1])
        places = _joined(mine, rows["end s"].max() / UNSEEN)
        axes.broken_barh(places, (streams.index(stream) - 0.35, 0.7), color=colour, lw=0.4)  # the edge shows the short
        patches[kind] = Patch(color=colour, label=kind)
    axes.set_yticks(range(len(streams)), streams)
    axes.invert_yaxis()
    return patches


def _joined(rows: pd.DataFrame, unseen_s: float) -> list[tuple[float, float]]:
    """Return starts and lengths, neighbours without a visible gap joined: a step has a thousand tasks."""
    in_order = rows.sort_values("start s", kind="stable")
    until = in_order["end s"].cummax()
    is_new = in_order["start s"] - until.shift(fill_value=-float("inf")) >= unseen_s
    ends = until.groupby(is_new.cumsum()).last()
    starts = in_order["start s"][is_new]
    return list(zip(starts, ends.to_numpy() - starts.to_numpy(), strict=True))


def save(spans: Sequence[Span], title: str, path: Path) -> None:
    """Draw a predicted step to a file."""
    rows = pd.DataFrame(_rows(spans))
    figure(rows.assign(setup=title, arm="step")).savefig(path)


def table() -> pd.DataFrame:
    """Return what runs when in a predicted step of GPT-2 XL on eight A100, under three arms: a row for each task."""
    machine = Machine(gpu="A100-80GB", disk_bytes_per_s=DISK_BYTES_PER_S)
    about = f"GPT-2 XL, 8 x A100 80GB, 8 rows of 1024 tokens each, a disk of {size(DISK_BYTES_PER_S)}/s"
    rows = []
    for arm in ("ddp", "zero3", "zero3_nvme"):
        setup = Setup.of_arm(
            named("gpt2-xl"), arm, ranks=8, precision="bf16_cast", micro_batch=8, sequence=1024, device="cuda"
        )
        rows += [{"setup": about, "arm": arm} | row for row in _rows(step_time(setup, machine).timeline)]
    return pd.DataFrame(rows)


@style.figure
def figure(rows: pd.DataFrame) -> Figure:
    """A predicted step of each arm, one row for each stream."""
    arms = parts(rows, "arm")
    drawing, axes = style.panels([0.5 + 0.35 * mine["stream"].nunique() for mine in arms.values()])
    handles: dict[str, Patch] = {}
    for ax, (arm, mine) in zip(axes, arms.items(), strict=True):
        handles |= lanes(ax, mine)
        ax.set_title(f"{arm}: {mine['end s'].max():.2g} s in a step")
    axes[-1].set_xlabel("seconds since the step began")
    text = f"Predicted, not measured: {rows['setup'].iloc[0]}. Dependencies between tasks are not drawn."
    return style.finished(drawing, list(handles.values()), text)
