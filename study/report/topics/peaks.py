"""Peak memory of a rank against the number of ranks."""

from collections.abc import Iterable

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from study.bench.prediction import predicted
from study.io.numbers import size
from study.records.groups import by, groups
from study.records.runs import Runs
from study.report import stacked, style
from study.report.grouping import SETTINGS, columns
from study.report.style import FAINT, OPEN, colour

APART = 0.3  # of a point's ranks, from the first arm to the last: equal points would hide each other


def table(runs: Runs, ranks: Iterable[int] = tuple(2**i for i in range(1, 11)), most: int | None = None) -> list[dict]:
    """Peak memory of a rank against the number of ranks: measured, and by formulas.

    `most` limits it to the groups with the most arms, because each prediction takes a part of a second.
    """
    rows = []
    known = [run for run in runs.done if run.tracked_bytes and run.kind != "capped"]
    by_arms = sorted(groups(known, only=SETTINGS).items(), key=lambda item: -len({run.arm for run in item[1]}))
    for group, members in by_arms[:most]:
        for repeats in by(members, "arm", "ranks", "kind").values():
            largest = {"source": "seen", "bytes": max(run.tracked_bytes for run in repeats), "n": len(repeats)}
            rows.append({"group": group} | columns(repeats[0], "arm", "ranks", "kind") | largest)
        for (arm,), mine in by([run for run in members if run.ranks > 1], "arm").items():
            place = {"group": group, "arm": arm}
            for count in ranks:
                if ours := predicted(mine[0].record, ranks=count):
                    of_theory = {"ranks": count, "kind": "predicted", "source": "predicted", "bytes": ours.peak_bytes}
                    rows.append(place | of_theory | {"n": 0})
    return rows


def title(rows: list[dict]) -> str:
    ranks = max(row["ranks"] for row in rows)
    held = {row["arm"]: row["bytes"] for row in rows if row["ranks"] == ranks and row["source"] == "predicted"}
    if len(held) < 2:
        return "Peak memory of a rank as ranks are added"
    least, most = min(held, key=held.get), max(held, key=held.get)
    return f"On {ranks} ranks, {least} is predicted to hold {size(held[least])}, {most} {size(held[most])}"


@style.figure
def figure(rows: list[dict]) -> Figure:
    """Peak memory of a rank against the number of ranks: formulas as lines, measurements as points."""
    drawing, (ax,) = style.panels([3.5])
    scale, unit = stacked.scale(max(row["bytes"] for row in rows))
    arms, seen = style.ordered(row["arm"] for row in rows), [row for row in rows if row["source"] == "seen"]
    for (arm,), mine in by([row for row in rows if row["source"] == "predicted"], "arm").items():
        sizes, number = [row["bytes"] / scale for row in mine], arms.index(arm)
        dashes = (5 * number, (9, 6)) if number else "-"
        (line,) = ax.plot([row["ranks"] for row in mine], sizes, color=colour(arm), linestyle=dashes)
        style.tell(line, arm, f"{arm}, predicted: {sizes[0]:.3g} to {sizes[-1]:.3g} {unit}")
    for row in seen:
        offset = 1 + APART * (arms.index(row["arm"]) / max(1, len(arms) - 1) - 0.5)
        style.point(ax, row["ranks"] * offset, row | {"size": row["bytes"] / scale}, "size", zorder=3)
    ax.set(xscale="log", yscale="log", xlabel="number of ranks", ylabel=f"peak memory of a rank ({unit})")
    ax.set_xticks([2**i for i in range(0, 11, 2)], [str(2**i) for i in range(0, 11, 2)])
    ax.xaxis.set_minor_formatter(NullFormatter())
    style.plain(ax.yaxis)
    ends = {
        row["arm"]: row["bytes"] / scale for row in rows if row["source"] == "predicted"
    }  # the last is furthest right
    style.name_ends(ax, ends)
    style.headed(ax, title(rows), rows[0]["group"])
    marks = {"predicted": {"color": FAINT}, "measured": {"color": FAINT, "marker": "o", "linestyle": ""}}
    if any(row["kind"] == "virtual" for row in seen):
        marks["virtual rank"] = OPEN
    text = "Points of one number of ranks are drawn side by side. Lines: from formulas and the arm's config alone."
    without_line = [row for row in rows if row["arm"] not in ends]
    note = f"Points: the largest measured peak, {style.counted(seen)}. {text}"
    return style.finished(drawing, style.keys(without_line, marks), note)
