"""Speed over DDP's as the batch grows."""

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from study.records.groups import by, groups
from study.records.runs import Runs
from study.report import published, seconds, style
from study.report.style import FAINT, INK, colour, ordered

VARIED = {"micro_batch": "rows per pass", "accumulation": "passes per step"}


def table(runs: Runs, baseline: str = "ddp") -> list[dict]:
    """Speed over the baseline's as the batch grows, by rows per pass or by passes; and document 000's numbers."""
    rows = []
    for setting, words in VARIED.items():
        for group, members in groups(seconds.timed(runs), without=(setting,)).items():
            baselines = by([run for run in members if run.arm == baseline], "ranks")
            varied = [ranks for (ranks,), mine in baselines.items() if len({run.value(setting) for run in mine}) > 1]
            for (value, ranks), mine in by([run for run in members if run.ranks in varied], setting, "ranks").items():
                of_arm = by(mine, "arm")
                base = of_arm.pop((baseline,), [])
                for (arm,), repeats in of_arm.items() if base else ():
                    place = {"group": group, "varied": words, "arm": arm, "value": value, "ranks": ranks}
                    place |= {"batch": repeats[0].rows_per_step, "source": "measured"}
                    rows.append(place | seconds.middle(seconds.of(base), seconds.of(repeats)))
    for band in published.BATCHES_000 if rows else ():
        for arm in ("zero2", "zero3"):
            place = {"group": None, "varied": "batch", "arm": arm, "value": band["from"], "ranks": 8}
            place |= {"batch": band["from"], "source": "document 000", "median": band[arm], "low": None, "high": None}
            rows.append(place | {"n": 0, "from": band["from"], "to": band["to"]})
    return rows


def sentence(rows: list[dict]) -> str:
    """From `batches.table`: whether a larger batch favours an arm."""
    items = []
    for (varied, arm), mine in by([row for row in rows if row["source"] == "measured"], "varied", "arm").items():
        if len(mine) > 1:
            first, *_, last = sorted(mine, key=lambda row: row["batch"])
            small = f"{first['median']:.0%} of DDP's speed at {first['batch']} rows a step"
            items.append(f"- {varied}, {arm}: {small}, {last['median']:.0%} at {last['batch']}")
    return "\n".join(items)


def title(rows: list[dict]) -> str:
    parts = []
    for arm in ordered(row["arm"] for row in rows):
        speeds = [row["median"] for row in rows if row["arm"] == arm]
        parts.append(f"{arm} {min(speeds):.0%} to {max(speeds):.0%}")
    return f"Speed relative to DDP's: {', '.join(parts)}"


@style.figure
def figure(rows: list[dict]) -> Figure:
    """Speed relative to DDP's as the batch grows, by rows per pass and passes per step, with document 000's numbers."""
    measured = [row for row in rows if row["source"] == "measured"]
    varieties = by(measured, "varied")
    drawing, axes = style.panels([2.2] * len(varieties), sharex=True)
    bar = {"linewidth": 5, "alpha": 0.35}
    for ax, ((varied,), mine) in zip(axes, varieties.items(), strict=True):
        for row in rows:
            if row["source"] != "measured":
                ends = [row["from"], max(row["to"], 1.35 * row["from"])]
                ax.plot(ends, [row["median"]] * 2, color=colour(row["arm"]), solid_capstyle="butt", **bar)
        for points in by(mine, "group", "arm").values():
            seconds.curve(ax, "batch", sorted(points, key=lambda row: row["batch"]))
        ax.axhline(1, color=INK, linewidth=0.8)
        ax.set(xscale="log", ylabel="speed (DDP = 100%)")
        ax.yaxis.set_major_formatter(PercentFormatter(1, 0))
        alike = list(dict.fromkeys(row["group"] for row in mine))
        which = style.conditions(alike[0]) if len(alike) == 1 else f"{len(alike)} groups of runs, a line for each"
        style.headed(ax, title(mine), f"varied: {varied} ({which})")
    axes[-1].set_xlabel("rows in a step, all ranks together")
    axes[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes[-1].xaxis.set_minor_formatter(NullFormatter())
    marks = {"document 000 (eight H100)": {"color": FAINT} | bar}
    return style.finished(drawing, style.keys(rows, marks), seconds.note(measured))
