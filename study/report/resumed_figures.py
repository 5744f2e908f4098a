"""Figures of checkpoints: what they cost, and how exactly trainings go on from them."""

from matplotlib.figure import Figure

from study.records.groups import by
from study.report import style, titles
from study.report.style import EXACT, FAINT, INK, colour

ROUTES = {"killed, and resumed": "o", "as it is": "D", "universal checkpoint": "^"}  # by which a training went on


@style.figure
def checkpoints(rows: list[dict]) -> Figure:
    """The bytes of a checkpoint for each parameter, measured and predicted, and the seconds to save and to load it."""
    several = {arm for (arm,), mine in by(rows, "arm").items() if len(mine) > 1}
    names = [f"{row['arm']}, {row['ranks']} ranks" if row["arm"] in several else row["arm"] for row in rows]
    drawing, (above, below) = style.panels([0.8 + 0.2 * len(rows)] * 2)
    exact = {"color": INK, "marker": "|", "markersize": 11, "markeredgewidth": 1.6, "linestyle": ""}
    load = {"color": INK, "marker": "D", "markersize": 4.5, "linestyle": ""}
    parts = {"save s": style.SKY, "seal s": style.YELLOW}
    for place, (name, row) in enumerate(zip(names, rows, strict=True)):
        arm, size, predicted = row["arm"], row["bytes a parameter"], row["predicted bytes a parameter"]
        (bar,) = above.barh(place, size, 0.7, color=colour(arm), alpha=0.75)
        words = f", predicted {predicted:.4g}" if predicted else ""
        style.tell(bar, arm, f"{name}: {size:.4g} bytes a parameter{words}")
        above.annotate(f"{size:.3g}", (size, place), (8, 0), textcoords="offset points", va="center", fontsize=8.5)
        if predicted:
            above.plot([predicted], [place], **exact)
        left = 0.0
        for part, tone in parts.items():
            (bar,) = below.barh(place, row[part], 0.7, left, color=tone, edgecolor=FAINT, linewidth=0.6)
            style.tell(bar, arm, f"{name}: {row[part]:.2g} s to {part.removesuffix(' s')}")
            left += row[part]
        if row["load s"] is not None:
            (mark,) = below.plot([row["load s"]], [place], **load)
            style.tell(mark, arm, f"{name}: {row['load s']:.2g} s to load")
    for ax in (above, below):
        style.name_bars(ax, names)
        ax.margins(x=0.1, y=0.02)
    style.headed(above, titles.checkpoints(rows), rows[0]["group"])
    style.headed(below, titles.saving(rows), "")
    above.set_xlabel("bytes of a checkpoint, for each parameter")
    below.set_xlabel("seconds, of the slowest rank")
    entries = style.keys([], {"predicted": exact, "load": load})
    entries += style.patches({"save": style.SKY, "seal": style.YELLOW})
    text = "n = 1 checkpoint for each bar, the last of its run. Seal: checksums of all files, and waiting for the disk."
    text += " Where nothing went on from one, no load is drawn."
    return style.finished(drawing, entries, text, 4)


@style.figure
def went_on(rows: list[dict]) -> Figure:
    """How far the losses of trainings that went on from a checkpoint are from those of trainings without a break."""
    drawing, (ax,) = style.panels([0.8 + 0.19 * len(rows)])
    for place, row in enumerate(rows):
        arm, off = row["arm"], row["losses differ by"]
        (mark,) = ax.plot([max(off, EXACT)], [place], ROUTES[row["route"]], color=colour(arm), markersize=6)
        style.tell(mark, arm, f"{row['line']}, {row['route']}: {f'{off:.1e} off' if off else 'the same bits'}")
    style.name_bars(ax, [row["line"] for row in rows])
    ax.set(xscale="log", xlabel="largest difference of a loss, over the loss")
    ax.set_xlim(EXACT / 1.8, 3 * max(1e-6, *(row["losses differ by"] for row in rows)))
    ax.margins(y=0.02)
    style.from_zero(ax.xaxis)
    style.headed(ax, titles.went_on(rows), rows[0]["group"])
    shown = {row["route"] for row in rows}
    marks = {route: {"color": INK, "marker": mark, "linestyle": ""} for route, mark in ROUTES.items() if route in shown}
    text = "n = 1 run for each point. Killed runs have dropout, and are held against the same run never killed. Moves"
    text += " have none, and are held against their source; the number behind an arm in a move is its ranks."
    return style.finished(drawing, style.keys([], marks), text)
