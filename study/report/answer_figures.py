"""The figures of the index: models of usual size, with the prediction and published measurements beside each bar."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from study.io.numbers import count, size
from study.records.groups import by
from study.report import style
from study.report.style import CARD, FAINT, INK, colour

STATES = ("weights", "gradients", "optimizer")
OTHER = "buckets, activations, other"
PARTS = {part: style.PARTS[part] for part in STATES} | {OTHER: style.PARTS["other"]}
PREDICTED = {"color": INK, "marker": "|", "markersize": 11, "markeredgewidth": 2, "linestyle": "none"}
PUBLISHED = {"color": style.VERMILION, "marker": "D", "markersize": 6, "markeredgecolor": CARD, "linestyle": "none"}


@style.figure
def memory(rows: list[dict]) -> Figure:
    """Peak memory of a rank under each arm, model by model and by part, beside predicted and published totals."""
    models = by(rows, "model")
    arms = {
        model: style.ordered(row["arm"] for row in mine if row["basis"] == mine[0]["basis"])
        for model, mine in models.items()
    }
    drawing, axes = style.panels([0.8 + 0.25 * len(names) for names in arms.values()])
    for ax, (model, mine) in zip(axes, models.items(), strict=True):
        _panel_of_memory(ax, mine, arms[model])
    axes[-1].set_xlabel("peak memory of a rank", loc="right")
    marks = {"predicted": PREDICTED}
    if any(row["basis"].startswith("published") for row in rows):
        marks["published, other settings"] = PUBLISHED
    entries = style.patches(PARTS) + [Line2D([], [], label=label, **look) for label, look in marks.items()]
    text = "Each panel has its own scale. n = 1 run for each bar. Published: the same model, arm and number of GPUs,"
    return style.finished(drawing, entries, f"{text} but other rows and passes (in the data file).", 3)


def _panel_of_memory(ax: Axes, rows: list[dict], arms: list[str]) -> None:
    basis, first = rows[0]["basis"], rows[0]
    of_basis = by(rows, "basis", "arm")
    longest = max(sum(row["bytes"] for row in mine) for mine in of_basis.values())
    scale, unit = (1e9, "GB") if longest >= 1e9 else (1e6, "MB")
    for place, arm in enumerate(arms):
        held, left = _few_parts(of_basis[basis, arm]), 0.0
        for part, part_bytes in held.items():
            (bar,) = ax.barh(place, part_bytes / scale, 0.72, left, color=PARTS[part], edgecolor=FAINT, linewidth=0.5)
            style.tell(bar, arm, f"{arm}, {part}: {size(part_bytes)}")
            left += part_bytes / scale
        others = {
            name: sum(row["bytes"] for row in of_basis.get((name, arm), []))
            for name in ("predicted", "published by others")
        }
        furthest = max(left, *(each / scale for each in others.values()))
        for name, look in (("predicted", PREDICTED), ("published by others", PUBLISHED)):
            if others[name]:
                (mark,) = ax.plot(others[name] / scale, place, **look)
                style.tell(mark, arm, f"{arm}, {name}: {size(others[name])}")
        text = ax.annotate(
            size(left * scale), (furthest, place), (6, 0), textcoords="offset points", va="center", fontsize=8.5
        )
        style.tell(text, arm)
    style.name_bars(ax, arms)
    ax.margins(y=0.03)
    ax.set_xlim(0, 1.2 * longest / scale)  # room for the number behind a bar
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g} {unit}" if value else "0")
    words = "virtual ranks" if "virtual" in basis else "real ranks"
    lead = f"{first['model']}, {count(first['parameters'])} parameters" if first["parameters"] else first["model"]
    lead = lead[0].upper() + lead[1:]
    style.headed(ax, f"{lead}, on {first['ranks']} {words}", first["conditions"])


def _few_parts(rows: list[dict]) -> dict[str, float]:
    """The three kinds of model states, and everything else as one part."""
    sizes = dict.fromkeys(PARTS, 0.0)
    for row in rows:
        sizes[row["part"] if row["part"] in STATES else OTHER] += row["bytes"]
    return {part: held for part, held in sizes.items() if held}


@style.figure
def steps(rows: list[dict]) -> Figure:
    """Seconds of a step under each arm: predicted with their intervals, and what others measured."""
    settings = by(rows, "setting")
    drawing, axes = style.panels([0.7 + 0.25 * len({row["arm"] for row in mine}) for mine in settings.values()])
    for ax, ((setting,), mine) in zip(axes, settings.items(), strict=True):
        arms = style.ordered(row["arm"] for row in mine)
        for row in mine:
            place = arms.index(row["arm"])
            words = f"{row['arm']}, {row['basis']}: {row['seconds']:.2g} s"
            if row["low"] is None:
                (mark,) = ax.plot(row["seconds"], place, **PUBLISHED)
            else:
                words += f" ({row['low']:.2g} to {row['high']:.2g})"
                (line,) = ax.plot([row["low"], row["high"]], [place] * 2, color=colour(row["arm"]), linewidth=2)
                style.tell(line, row["arm"], words)
                (mark,) = ax.plot(row["seconds"], place, "o", color=colour(row["arm"]), markerfacecolor=CARD)
                text = ax.annotate(
                    f"{row['seconds']:.2g} s",
                    (row["high"], place),
                    (6, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8.5,
                )
                style.tell(text, row["arm"])
            style.tell(mark, row["arm"], words)
        style.name_bars(ax, arms)
        ax.margins(x=0.14, y=0.06)
        ax.set_xlim(left=0)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g} s" if value else "0")
        style.headed(ax, f"{setting} in a step", "Llama-3-8B on eight H100")
    axes[-1].set_xlabel("seconds of an optimizer step", loc="right")
    marks = {"predicted, with its interval": {"color": FAINT, "marker": "o", "markerfacecolor": CARD}}
    marks["measured by others"] = PUBLISHED
    sources = ", ".join(sorted({row["source"] for row in rows if row.get("source")}))
    text = f"Nothing was measured on a GPU here. Measured by others: {sources}, which does not say on which GPUs, nor"
    return style.finished(
        drawing, style.keys([], marks), f"{text} whether activations were recomputed. DDP would not fit into 80 GB.", 2
    )


@style.figure
def traffic(rows: list[dict]) -> Figure:
    """Bytes that a rank sends in a step, as multiples of one all-reduce, by collective, and the ZeRO paper's number."""
    arms = style.ordered(row["arm"] for row in rows)
    drawing, (ax,) = style.panels([0.9 + 0.28 * len(arms)])
    for place, arm in enumerate(arms):
        left = 0.0
        for row in (row for row in rows if (row["arm"], row["source"]) == (arm, "counted")):
            tone = style.COLLECTIVES.get(row["collective"], FAINT)
            (bar,) = ax.barh(place, row["times"], 0.72, left, color=tone, edgecolor=FAINT, linewidth=0.5)
            style.tell(bar, arm, f"{arm}, {row['collective']}: {row['times']:.2g} times an all-reduce")
            left += row["times"]
        paper = sum(row["times"] for row in rows if (row["arm"], row["source"]) == (arm, "ZeRO paper"))
        (mark,) = ax.plot(paper, place, **PREDICTED)
        style.tell(mark, arm, f"{arm}, ZeRO paper: {paper:.2g} times")
        text = ax.annotate(
            f"{left:.2g}", (max(left, paper), place), (6, 0), textcoords="offset points", va="center", fontsize=8.5
        )
        style.tell(text, arm)
    style.name_bars(ax, arms)
    ax.margins(x=0.12, y=0.03)
    ax.set_xlim(left=0)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g} x")
    first = rows[0]
    words = "virtual ranks" if any(row["kind"] == "virtual" for row in rows) else "real ranks"
    style.headed(ax, f"{first['model']} on {first['ranks']} {words}", first["conditions"])
    ax.set_xlabel("bytes that a rank sends in a step (1 = one all-reduce of the gradients)", loc="right")
    present = {row["collective"] for row in rows if row["source"] == "counted"}
    entries = style.patches({name: tone for name, tone in style.COLLECTIVES.items() if name in present})
    entries.append(Line2D([], [], label="ZeRO paper", **PREDICTED))
    text = f"Counted: {style.counted(rows)}. Bytes as sent in rings, where an all-reduce sends the data twice."
    return style.finished(drawing, entries, text, 4)
