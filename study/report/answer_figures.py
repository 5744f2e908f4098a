"""The figures of the index and of the README: models of usual size, with prediction and published numbers beside."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from study.core.numbers import count, nats, size
from study.report import style
from study.report.grouping import each, parts, sums
from study.report.style import CARD, FAINT, INK, Look, colour
from study.report.topics import traffic as bytes_sent

STATES = ("weights", "gradients", "optimizer")
OTHER = "buckets, activations, other"
HOST = "host memory"
PARTS = {part: style.PARTS[part] for part in STATES} | {OTHER: style.PARTS["other"], HOST: style.SHADE}
PREDICTED: Look = {"color": INK, "marker": "|", "markersize": 11, "markeredgewidth": 2, "linestyle": "none"}
PUBLISHED: Look = {"color": style.VERMILION, "marker": "D", "markersize": 6, "linestyle": "none"}
BELOW: Look = {"loc": "upper center", "bbox_to_anchor": (0.45, -0.16), "ncols": 2, "fontsize": 8}
MARKS = {"predicted": PREDICTED, "published by others": PUBLISHED}
OFFLOADED = "Pale: without a GPU, host and device are one memory, so the split of what is offloaded is predicted."


@style.figure
def memory(rows: pd.DataFrame) -> Figure:
    """GPU memory of a rank under each arm, model by model and by part, beside predicted and published totals."""
    models = parts(rows, "model")
    arms = {model: style.ordered(mine[mine["basis"] != "published by others"]["arm"]) for model, mine in models.items()}
    drawing, axes = style.panels([0.8 + 0.25 * len(names) for names in arms.values()])
    for ax, (model, mine) in zip(axes, models.items(), strict=True):
        first = mine.iloc[0]
        draw_memory(ax, mine, arms[model])
        words = "virtual ranks" if "virtual" in first["basis"] else "real ranks"
        lead = f"{model}, {count(first['parameters'])} parameters, on {first['ranks']} {words}"
        style.headed(ax, first["conditions"], lead)
    axes[-1].set_xlabel("peak memory of a rank's GPU, and of its part of the host", loc="right")
    text = "Each panel has its own scale. n = 1 run for each bar. Published: the same model, arm and number of GPUs,"
    text += f" but other rows and passes (in the data file). {OFFLOADED} It is left out where a GPU would need other"
    text += " memory than the CPU that was measured."
    return style.finished(drawing, [*style.patches(PARTS), *style.keys([], MARKS)], text)


def draw_memory(ax: Axes, rows: pd.DataFrame, arms: list[str]) -> None:
    """Draw the parts of each arm's peak as one bar, pale if it is predicted, and other totals as marks."""
    for place, arm in enumerate(arms):
        of_basis = parts(rows[rows["arm"] == arm], "basis")
        basis, first_rows = next(iter(of_basis.items()))
        few = first_rows.assign(part=first_rows["part"].where(first_rows["part"].isin(PARTS), OTHER))
        sizes = {part: sums(few, "part", "bytes").get(part, 0) for part in PARTS}
        known = [(sizes[part], PARTS[part]) for part in PARTS if sizes[part]]
        ends = [style.stack(ax, place, known, alpha=0.55 if basis == "predicted" else 1)]
        for name in MARKS.keys() & of_basis.keys() - {basis}:
            ends.append(of_basis[name]["bytes"].sum())
            ax.plot(ends[-1], place, **MARKS[name])
        on_host = f" + {size(sizes[HOST])} host" * bool(sizes[HOST])
        style.annotate(ax, size(sum(sizes.values()) - sizes[HOST]) + on_host, max(ends), place)
    style.name_bars(ax, arms)
    ax.set_xlim(0, 1.3 * rows.groupby(["arm", "basis"])["bytes"].sum().max())  # room for the number behind a bar
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(lambda value, _: size(value) if value else "0")


@style.figure
def steps(rows: pd.DataFrame) -> Figure:
    """Seconds of a step under each arm: predicted with their intervals, and what others measured."""
    settings = parts(rows, "setting")
    drawing, axes = style.panels([0.7 + 0.25 * mine["arm"].nunique() for mine in settings.values()])
    for ax, (setting, mine) in zip(axes, settings.items(), strict=True):
        arms = style.ordered(mine["arm"])
        for row in each(mine):
            _draw_step(ax, arms.index(row.arm), row)
        style.name_bars(ax, arms)
        ax.margins(x=0.14, y=0.06)
        ax.set_xlim(left=0)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g} s" if value else "0")
        style.headed(ax, "Llama-3-8B on eight H100", f"{setting} in a step")
    axes[-1].set_xlabel("seconds of an optimizer step", loc="right")
    marks: dict[str, Look] = {
        "predicted, with its interval": {"color": FAINT, "marker": "o", "markerfacecolor": CARD},
        "measured by others": PUBLISHED,
    }
    sources = ", ".join(sorted(rows["source"].dropna().unique()))
    text = f"Nothing was measured on a GPU here. Measured by others: {sources}, which does not say on which GPUs, nor"
    text += " whether activations were recomputed. DDP would not fit into 80 GB."
    return style.finished(drawing, style.keys([], marks), text, 2)


def _draw_step(ax: Axes, place: int, row: Any) -> None:
    if pd.isna(row.low):
        ax.plot(row.seconds, place, **PUBLISHED)
        return
    ax.plot([row.low, row.high], [place] * 2, color=colour(row.arm), linewidth=2)
    ax.plot(row.seconds, place, "o", color=colour(row.arm), markerfacecolor=CARD)
    style.annotate(ax, f"{row.seconds:.2g} s", row.high, place)


@style.figure
def traffic(rows: pd.DataFrame) -> Figure:
    """Bytes that a rank sends in a step, as multiples of one all-reduce, by collective, and the ZeRO paper's number."""
    counted = rows[rows["source"] == bytes_sent.COUNTED]
    drawing, (ax,) = style.panels([0.9 + 0.28 * counted["arm"].nunique()])
    entries = draw_traffic(ax, rows)
    first = rows.iloc[0]
    words = "virtual ranks" if (rows["kind"] == "virtual").any() else "real ranks"
    style.headed(ax, first["conditions"], f"{first['model']} on {first['ranks']} {words}")
    text = f"Counted: {style.counted(counted)}. Bytes as sent in rings, where an all-reduce sends the data twice."
    return style.finished(drawing, entries, text, 4)


def draw_traffic(ax: Axes, rows: pd.DataFrame) -> list:
    """Draw what each arm sends as a bar of collectives, and the ZeRO paper's number as a mark. Return the legend."""
    counted = rows[rows["source"] == bytes_sent.COUNTED]
    paper = bytes_sent.by_arm(rows, bytes_sent.PAPER)
    arms = style.ordered(rows["arm"])
    for place, arm in enumerate(arms):
        times = sums(counted[counted["arm"] == arm], "collective", "times")
        pieces = [(length, style.COLLECTIVES.get(kind, FAINT)) for kind, length in times.items()]
        end = style.stack(ax, place, pieces)
        if arm in paper:
            ax.plot(paper[arm], place, **PREDICTED)
        style.annotate(ax, f"{end:.2g}", max(end, paper.get(arm, 0)), place)
    style.name_bars(ax, arms)
    ax.margins(x=0.12, y=0.03)
    ax.set_xlim(left=0)
    ax.set_xlabel("bytes sent in a step (1 = one all-reduce of the gradients)", loc="right")
    present = {kind: tone for kind, tone in style.COLLECTIVES.items() if (counted["collective"] == kind).any()}
    return [*style.patches(present), *style.keys([], {"ZeRO paper": PREDICTED})]


@style.figure
def picture(losses: pd.DataFrame, memory_rows: pd.DataFrame, sent: pd.DataFrame) -> Figure:
    """Three panels side by side: the losses lie on each other; GPU memory by part; bytes sent."""
    drawing = Figure(figsize=(2 * style.WIDTH, 4.6), layout="constrained")
    left, middle, right = drawing.subplots(1, 3, width_ratios=(1, 1.35, 1.1))
    of_arm = {arm: mine[mine["run"] == mine["run"].iloc[0]] for arm, mine in parts(losses, "arm").items()}
    for number, arm in enumerate(style.ordered(of_arm)):
        dashes = (4 * number, (4, 4 * (len(of_arm) - 1)))
        left.plot(of_arm[arm]["step"], of_arm[arm]["loss"], color=colour(arm), linestyle=dashes)
    left.set_title(f"Same losses\nDDP and {len(of_arm) - 1} arms, two real ranks, fp32")
    left.set(xlabel="optimizer step", ylabel="training loss of a small GPT (nats)")
    text = f"every arm within\n{nats(losses['difference'].max())} of DDP"
    left.text(0.97, 0.95, text, transform=left.transAxes, ha="right", va="top", fontsize=9)
    first = memory_rows.iloc[0]
    measured = memory_rows.groupby("arm", sort=False)["basis"].transform("first") == memory_rows["basis"]
    draw_memory(middle, memory_rows[measured], style.ordered(memory_rows["arm"]))
    middle.set_xlim(0, 1.28 * middle.dataLim.x1)
    middle.set_title(f"Less GPU memory\n{first['model']} on {first['ranks']} virtual ranks")
    middle.set_xlabel("a rank at its peak")
    middle.legend(handles=style.patches(PARTS), **BELOW)
    right.legend(handles=draw_traffic(right, sent), **BELOW)
    right.set_title(f"More traffic\nthe same runs, passes in a step: {sent['passes'].iloc[0]}")
    right.set_xlabel("bytes sent (1 = one all-reduce)", loc="center")
    drawing.supxlabel(OFFLOADED, x=0.01, ha="left", fontsize=8.5, color=FAINT)
    return drawing
