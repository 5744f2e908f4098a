"""Seconds of a step and the speed-up as the model grows: document 002, figure 2."""

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from study.records.groups import by, groups
from study.records.runs import Runs
from study.report import seconds, style
from study.report.grouping import SET_BY_MODEL, split_by_ranks
from study.report.published import SMALLEST_SPEEDUP_002, WORTHWHILE_FROM_BYTES_002
from study.report.style import INK, SHADE, ordered


def table(runs: Runs, base: str = "single", other: str = "zero3_cpu") -> list[dict]:
    """Seconds of a step as the model grows, and the speed-up by the other arm: document 002, figure 2."""
    rows = []
    chosen = [run for run in seconds.timed(runs) if run.arm in (base, other) and run.parameters and run.kind == "real"]
    for group, members in split_by_ranks(groups(chosen, without=("model", *SET_BY_MODEL))).items():
        sizes = {run.model: run.parameters for run in members}
        for model in sorted(sizes, key=sizes.get) if len(sizes) > 1 else ():
            of_arm = {arm: [run for run in members if (run.model, run.arm) == (model, arm)] for arm in (base, other)}
            common = {"group": group, "model": model, "parameters": sizes[model], "weights GB": 4 * sizes[model] / 1e9}
            for arm, mine in of_arm.items():
                if mine:
                    rows.append(common | {"what": "s/step", "arm": arm} | seconds.middle(seconds.of(mine)))
            if all(of_arm.values()):
                faster = seconds.middle(seconds.of(of_arm[base]), seconds.of(of_arm[other]))
                faster |= {key: faster[key] and faster[key] - 1 for key in ("median", "low", "high")}
                rows.append(common | {"what": "speed-up", "arm": other} | faster)
    return rows


def sentence(rows: list[dict]) -> str:
    """From `ladder.table`: the speed-up of the smallest and of the largest model."""
    ups = sorted((row for row in rows if row["what"] == "speed-up"), key=lambda row: row["parameters"])
    if not ups:
        return ""
    small, large = (
        f"**{row['median']:+.0%}** for the {which} ({row['model']}, {row['weights GB']:.3g} GB"
        for row, which in ((ups[0], "smallest model"), (ups[-1], "largest here"))
    )
    faster = next((row["model"] for row in ups if row["median"] > 0), None)
    first = f"The smallest model that is faster with it is {faster}." if faster else "No model is faster with it."
    printed = f"{SMALLEST_SPEEDUP_002:+.0%} for its smallest, and a gain beyond {WORTHWHILE_FROM_BYTES_002 / 1e9:g} GB"
    text = f"The speed-up by {ups[0]['arm']} is {small} of weights) and {large}). {first}"
    return f"{text} The document prints {printed}."


def title(rows: list[dict]) -> str:
    ups = [row for row in rows if row["what"] == "speed-up"]
    if not ups:
        return "Seconds of a step as the model grows"
    than = "".join(f" than {arm}" for arm in ordered(row["arm"] for row in rows) if arm != ups[0]["arm"])
    faster = [row["model"] for row in ups if row["median"] > 0]
    if not faster:
        return f"{ups[0]['arm']} is slower{than} for every model that was tried"
    return f"{ups[0]['arm']} is faster{than} for {len(faster)} of {len(ups)} models"


@style.figure
def figure(rows: list[dict]) -> Figure:
    """Seconds of a step and the speed-up as the model grows, with the values that document 002 prints."""
    drawing, axes = style.panels([2.1, 2.1], sharex=True)
    for (what, _, arm), mine in by(rows, "what", "group", "arm").items():
        seconds.curve(axes[what == "speed-up"], "weights GB", mine)
        for row in mine if what == "s/step" and arm == rows[0]["arm"] else ():
            at = (row["weights GB"], row["median"])
            axes[0].annotate(row["model"], at, (7, -8), textcoords="offset points", fontsize=8.5)
    sizes, from_gb = [row["weights GB"] for row in rows], WORTHWHILE_FROM_BYTES_002 / 1e9
    axes[1].axhline(0, color=INK, linewidth=0.8)
    axes[1].axvspan(from_gb, max(10 * from_gb, 1.5 * max(sizes)), color=SHADE, alpha=0.6, linewidth=0)
    axes[1].plot(min(sizes), SMALLEST_SPEEDUP_002, "_", color=INK, markersize=16, markeredgewidth=2.2)
    axes[0].set(yscale="log", xscale="log", ylabel="seconds of a step")
    axes[0].margins(y=0.18)  # the names stand below their points
    axes[1].set(ylabel="speed-up by ZeRO", xlabel="weights in fp32 (GB)")
    axes[1].yaxis.set_major_formatter(PercentFormatter(1, 0))
    style.plain(axes[0].yaxis)
    style.plain(axes[1].xaxis)
    style.headed(axes[0], title(rows), " and ".join(group for (group,) in by(rows, "group")))
    smallest = {"color": INK, "marker": "_", "linestyle": "", "markersize": 12}
    marks = {"document 002: its smallest model": smallest}
    marks["document 002: faster in this range"] = {"color": SHADE, "linewidth": 7}
    text = "Lines join the models of a family. The document prints only the two marked values of its figure."
    return style.finished(drawing, style.keys(rows, marks), f"{seconds.note(rows)} {text}", 2)
