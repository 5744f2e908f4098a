"""The figures of the index and of the README: models of usual size, with prediction and published numbers beside."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from study.io.numbers import count, nats, size
from study.report import style
from study.report.grouping import each, parts, sums
from study.report.style import CARD, FAINT, INK, Look, colour
from study.report.topics import traffic as bytes_sent
from study.report.topics.bars import scale

STATES = ("weights", "gradients", "optimizer")
OTHER = "buckets, activations, other"
HOST = "host memory"
PARTS = {part: style.PARTS[part] for part in STATES} | {OTHER: style.PARTS["other"], HOST: CARD}
PREDICTED: Look = {"color": INK, "marker": "|", "markersize": 11, "markeredgewidth": 2, "linestyle": "none"}
PUBLISHED: Look = {
    "color": style.VERMILION,
    "marker": "D",
    "markersize": 6,
    "markeredgecolor": CARD,
    "linestyle": "none",
}
BELOW: Look = {"loc": "upper center", "bbox_to_anchor": (0.45, -0.16), "ncols": 2, "fontsize": 8}
MARKS = {"predicted": PREDICTED, "published by others": PUBLISHED}
OFFLOADED = "Pale: without a GPU, host and device are one memory, so the split of what is offloaded is predicted."
LEFT_OUT = "It is left out where a GPU would need other memory than the CPU that was measured."


@style.figure
def memory(rows: pd.DataFrame) -> Figure:
    """GPU memory of a rank under each arm, model by model and by part, beside predicted and published totals."""
    models = parts(rows, "model")
    arms = {model: style.ordered(mine[mine["basis"] != "published by others"]["arm"]) for model, mine in models.items()}
    drawing, axes = style.panels([0.8 + 0.25 * len(names) for names in arms.values()])
    for ax, (model, mine) in zip(axes, models.items(), strict=True):
        _panel_of_memory(ax, mine, arms[model])
    axes[-1].set_xlabel("peak memory of a rank's GPU, and of its part of the host", loc="right")
    marks: dict[str, Look] = {"predicted": PREDICTED}
    if (rows["basis"] == "published by others").any():
        marks["published, other settings"] = PUBLISHED
    entries = [*memory_keys(rows), *(Line2D([], [], label=label, **look) for label, look in marks.items())]
    text = "Each panel has its own scale. n = 1 run for each bar. Published: the same model, arm and number of GPUs,"
    text += f" but other rows and passes (in the data file). {OFFLOADED} {LEFT_OUT}"
    return style.finished(drawing, entries, text, 3)


def memory_keys(rows: pd.DataFrame) -> list:
    """Return the legend of parts; host memory is hatched."""
    shown = {part: tone for part, tone in PARTS.items() if part != HOST or (rows["part"] == HOST).any()}
    entries = style.patches(shown)
    if HOST in shown:
        entries[-1].set_hatch("////")
    return entries


def _panel_of_memory(ax: Axes, rows: pd.DataFrame, arms: list[str]) -> None:
    first = rows.iloc[0]
    longest = rows.groupby(["arm", "basis"])["bytes"].sum().max()
    divisor, unit = scale(longest)
    for place, arm in enumerate(arms):
        of_basis = parts(rows[rows["arm"] == arm], "basis")
        furthest = draw_memory(ax, place, arm, of_basis[next(iter(of_basis))], divisor)
        for basis, look in MARKS.items():
            if basis in of_basis and basis != next(iter(of_basis)):
                total = of_basis[basis]["bytes"].sum()
                (mark,) = ax.plot(total / divisor, place, **look)
                style.tell(mark, arm, f"{arm}, {basis}: {size(total)}")
                furthest = max(furthest, total / divisor)
        held = of_basis[next(iter(of_basis))]
        style.tell(style.annotate(ax, label_of(held), furthest, place, 6), arm)
    style.name_bars(ax, arms)
    ax.margins(y=0.03)
    ax.set_xlim(0, 1.3 * longest / divisor)  # room for the number behind a bar
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g} {unit}" if value else "0")
    words = "virtual ranks" if "virtual" in first["basis"] else "real ranks"
    lead = f"{first['model']}, {count(first['parameters'])} parameters" if first["parameters"] else first["model"]
    style.headed(ax, f"{lead[0].upper()}{lead[1:]}, on {first['ranks']} {words}", first["conditions"])


def label_of(held: pd.DataFrame) -> str:
    """Return the size of a bar: of the GPU, and of the host if something is there."""
    on_gpu = held[held["part"] != HOST]["bytes"].sum()
    on_host = held[held["part"] == HOST]["bytes"].sum()
    return f"{size(on_gpu)} + {size(on_host)} host" if on_host else size(on_gpu)


def draw_memory(ax: Axes, place: int, arm: str, held: pd.DataFrame, divisor: float) -> float:
    """Draw the parts of a peak as one bar, pale if it is predicted. Return its length."""
    is_predicted = (held["basis"] == "predicted").all()
    left = 0.0
    for part, part_bytes in _few_parts(held).items():
        (bar,) = ax.barh(
            place,
            part_bytes / divisor,
            0.72,
            left,
            color=PARTS[part],
            edgecolor=FAINT,
            linewidth=0.5,
            alpha=0.55 if is_predicted else 1,
            hatch="////" if part == HOST else None,
        )
        style.tell(bar, arm, f"{arm}, {part}{', predicted' if is_predicted else ''}: {size(part_bytes)}")
        left += part_bytes / divisor
    return left


def _few_parts(rows: pd.DataFrame) -> dict[str, float]:
    """Return the three kinds of model states, everything else on the GPU as one part, and the host's."""
    few = rows.assign(part=rows["part"].where(rows["part"].isin([*STATES, HOST]), OTHER))
    sizes = sums(few, "part", "bytes")
    return {part: sizes[part] for part in PARTS if sizes.get(part)}


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
        style.headed(ax, f"{setting} in a step", "Llama-3-8B on eight H100")
    axes[-1].set_xlabel("seconds of an optimizer step", loc="right")
    marks: dict[str, Look] = {
        "predicted, with its interval": {"color": FAINT, "marker": "o", "markerfacecolor": CARD},
        "measured by others": PUBLISHED,
    }
    sources = ", ".join(sorted(rows["source"].dropna().unique()))
    text = f"Nothing was measured on a GPU here. Measured by others: {sources}, which does not say on which GPUs, nor"
    text += " whether activations were recomputed. DDP would not fit into 80 GB."
    return style.finished(drawing, style.keys([], marks), text, 2)


def _draw_step(ax: Axes, place: int, row) -> None:
    words = f"{row.arm}, {row.basis}: {row.seconds:.2g} s"
    if pd.isna(row.low):
        (mark,) = ax.plot(row.seconds, place, **PUBLISHED)
        style.tell(mark, row.arm, words)
        return
    words += f" ({row.low:.2g} to {row.high:.2g})"
    (line,) = ax.plot([row.low, row.high], [place] * 2, color=colour(row.arm), linewidth=2)
    (mark,) = ax.plot(row.seconds, place, "o", color=colour(row.arm), markerfacecolor=CARD)
    text = style.annotate(ax, f"{row.seconds:.2g} s", row.high, place, 6)
    style.tell(line, row.arm, words)
    style.tell(mark, row.arm, words)
    style.tell(text, row.arm)


@style.figure
def traffic(rows: pd.DataFrame) -> Figure:
    """Bytes that a rank sends in a step, as multiples of one all-reduce, by collective, and the ZeRO paper's number."""
    counted = rows[rows["source"] == bytes_sent.COUNTED]
    drawing, (ax,) = style.panels([0.9 + 0.28 * counted["arm"].nunique()])
    draw_traffic(ax, rows)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g} x")
    first = rows.iloc[0]
    words = "virtual ranks" if (rows["kind"] == "virtual").any() else "real ranks"
    style.headed(ax, f"{first['model']} on {first['ranks']} {words}", first["conditions"])
    ax.set_xlabel("bytes that a rank sends in a step (1 = one all-reduce of the gradients)", loc="right")
    text = f"Counted: {style.counted(counted)}. Bytes as sent in rings, where an all-reduce sends the data twice."
    return style.finished(drawing, traffic_keys(rows), text, 4)


def draw_traffic(ax: Axes, rows: pd.DataFrame) -> None:
    """Draw what each arm sends as a bar of collectives, and the ZeRO paper's number as a mark."""
    arms = style.ordered(rows["arm"])
    paper = bytes_sent.by_arm(rows, bytes_sent.PAPER)
    for place, arm in enumerate(arms):
        left = 0.0
        for row in each(rows[(rows["arm"] == arm) & (rows["source"] == bytes_sent.COUNTED)]):
            tone = style.COLLECTIVES.get(row.collective, FAINT)
            (bar,) = ax.barh(place, row.times, 0.72, left, color=tone, edgecolor=FAINT, linewidth=0.5)
            style.tell(bar, arm, f"{arm}, {row.collective}: {row.times:.2g} times an all-reduce")
            left += row.times
        if arm in paper:
            (mark,) = ax.plot(paper[arm], place, **PREDICTED)
            style.tell(mark, arm, f"{arm}, ZeRO paper: {paper[arm]:.2g} times")
        style.tell(style.annotate(ax, f"{left:.2g}", max(left, paper.get(arm, 0)), place, 6), arm)
    style.name_bars(ax, arms)
    ax.margins(x=0.12, y=0.03)
    ax.set_xlim(left=0)


def traffic_keys(rows: pd.DataFrame) -> list:
    """Return the legend of collectives, and of the ZeRO paper's mark."""
    present = set(rows[rows["source"] == bytes_sent.COUNTED]["collective"])
    entries = style.patches({name: tone for name, tone in style.COLLECTIVES.items() if name in present})
    return [*entries, Line2D([], [], label="ZeRO paper", **PREDICTED)]


# --- the README's picture ------------------------------------------------------------------------------------------


@style.figure
def picture(losses: pd.DataFrame, held: pd.DataFrame, sent: pd.DataFrame) -> Figure:
    """Three panels side by side: the losses lie on each other; GPU memory by part; bytes sent."""
    drawing = Figure(figsize=(2 * style.WIDTH, 4.6), layout="constrained")
    left, middle, right = drawing.subplots(1, 3, width_ratios=(1, 1.35, 1.1))
    _picture_of_losses(left, losses)
    arms = style.ordered(held["arm"])
    for place, arm in enumerate(arms):
        mine = held[held["arm"] == arm]
        mine = mine[mine["basis"] == mine["basis"].iloc[0]]
        length = draw_memory(middle, place, arm, mine, 1e9)
        style.annotate(middle, label_of(mine), length, place, 3)
    style.name_bars(middle, arms)
    middle.margins(x=0.28)
    first = held.iloc[0]
    middle.set_title(f"Less GPU memory\n{first['model']} on {first['ranks']} virtual ranks")
    middle.set_xlabel("GB of a rank at its peak")
    middle.legend(handles=memory_keys(held), **BELOW)
    draw_traffic(right, sent)
    right.set_title("More traffic\nthe same runs")
    right.set_xlabel("bytes sent (1 = one all-reduce)")
    right.legend(handles=traffic_keys(sent), **BELOW)
    drawing.supxlabel(OFFLOADED, x=0.01, ha="left", fontsize=8.5, color=FAINT)
    return drawing


def _picture_of_losses(ax: Axes, rows: pd.DataFrame) -> None:
    arms = parts(rows, "arm")
    for number, arm in enumerate(style.ordered(arms)):
        mine = arms[arm][arms[arm]["run"] == arms[arm]["run"].iloc[0]]
        dashes = (4 * number, (4, 4 * (len(arms) - 1)))
        ax.plot(mine["step"], mine["loss"], color=colour(arm), linestyle=dashes)
    ax.set_title(f"Same losses\nDDP and {len(arms) - 1} arms, two real ranks, fp32")
    ax.set(xlabel="optimizer step", ylabel="training loss of a small GPT (nats)")
    text = f"every arm within\n{nats(rows['difference'].max())} of DDP"
    ax.text(0.97, 0.95, text, transform=ax.transAxes, ha="right", va="top", fontsize=9)
