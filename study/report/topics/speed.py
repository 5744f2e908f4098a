"""Seconds of a step: as the batch grows, as the model grows, against memory, one setting varied, on several machines.

Ratios are of runs in one environment. Two environments are only compared cell by cell.
"""

import math
import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from study.io.numbers import size
from study.records import stats
from study.records.compare import compare
from study.records.groups import by, groups, lines
from study.records.runs import Run, Runs
from study.report import style
from study.report.grouping import SET_BY_MODEL, columns, each, largest_groups, least, parts, split_by_ranks
from study.report.style import FAINT, INK, OPEN, SHADE, colour, conditions

VARIED = {"micro_batch": "rows per pass", "accumulation": "passes per step"}
NO_TIMES = "**No times are compared:** no run here was on a GPU, and seconds of a CPU say nothing about GPUs."
NO_TIMES += " `study estimate` predicts them."
MEASURED = ("loss", "step_s", "peak_mb", "moved_mb")
# Document 000, "Communication Amortization Effects": speed over DDP's, for effective batches from and to.
BATCHES_000 = (
    {"from": 32, "to": 64, "zero2": 0.92, "zero3": 0.72},
    {"from": 96, "to": 144, "zero2": 0.95, "zero3": 0.78},
    {"from": 192, "to": 384, "zero2": 0.96, "zero3": 0.85},
    {"from": 512, "to": 512, "zero2": 0.97, "zero3": 0.89},  # "512+"
)
# Document 002: figure 2 has no numbers in the text but these. BERT-large, one A100.
SMALLEST_SPEEDUP_002 = -0.05  # "almost 5 %" slower
WORTHWHILE_FROM_BYTES_002 = 2e9  # "crossing the 2GB barrier", read as the size of the fp32 weights
BAR: dict[str, Any] = {"linewidth": 5, "alpha": 0.35}


def timed(runs: Runs) -> list[Run]:
    """Return the finished runs whose seconds say something of other machines: on GPUs, or on links of a known speed."""
    return [run for run in runs.done if run.median_step_s and not run.virtual and (run.device == "cuda" or run.hosts)]


def seconds(runs: Iterable[Run]) -> list[float]:
    """Return the median seconds of a step of each run that has them."""
    return [run.median_step_s for run in runs if run.median_step_s]


def middle(values: list[float], over: list[float] | None = None) -> dict:
    """Return a median over runs, or a ratio of two, with its interval where there are enough runs, and their number."""
    rng = np.random.default_rng(0)
    if over is None:
        n = len(values)
        median, low, high = stats.median_with_interval(values, rng)
    else:
        n = min(len(values), len(over))
        median, low, high = stats.ratio_of_medians(values, over, rng)
    enough = n >= stats.FEWEST_RUNS
    return {"median": median, "low": low if enough else None, "high": high if enough else None, "n": n}


def note(rows: pd.DataFrame) -> str:
    """Return what the points of a figure are: medians of how many runs, and whether they have intervals."""
    with_intervals = rows["low"].notna().any()
    intervals = f"95 % intervals from {stats.FEWEST_RUNS} runs on" if with_intervals else "too few for intervals"
    return f"Points: medians over runs, {style.counted(rows)}, {intervals}."


def curve(ax: Axes, x: str, rows: pd.DataFrame) -> None:
    """Draw the medians of one arm as points on a line."""
    ax.plot(rows[x], rows["median"], color=colour(rows["arm"].iloc[0]), linewidth=1)
    for row in each(rows):
        style.point(ax, getattr(row, x), row)


# --- as the batch grows --------------------------------------------------------------------------------------------


def batches(runs: Runs, baseline: str = "ddp") -> pd.DataFrame:
    """Return the speed over the baseline's as the batch grows, by rows per pass or by passes; and document 000's."""
    rows = []
    for setting in VARIED:
        for group, members in groups(timed(runs), without=(setting,)).items():
            baselines = by([run for run in members if run.arm == baseline], "ranks")
            varied = [ranks for (ranks,), mine in baselines.items() if len({run.value(setting) for run in mine}) > 1]
            for (value, ranks), mine in by([run for run in members if run.ranks in varied], setting, "ranks").items():
                of_arm = by(mine, "arm")
                base = of_arm.pop((baseline,), [])
                for (arm,), repeats in of_arm.items() if base else ():
                    row = {"group": group, "varied": VARIED[setting], "arm": arm, "value": value, "ranks": ranks}
                    row |= {"batch": repeats[0].rows_per_step, "source": "measured"}
                    rows.append(row | middle(seconds(base), seconds(repeats)))
    for band in BATCHES_000 if rows else ():
        place = {"varied": "batch", "value": band["from"], "batch": band["from"], "ranks": 8, "n": 0}
        place |= {"source": "document 000", "from": band["from"], "to": band["to"]}
        rows += [place | {"arm": arm, "median": band[arm]} for arm in ("zero2", "zero3")]
    return pd.DataFrame(rows)


def sentence_of_batches(rows: pd.DataFrame) -> str:
    """Return whether a larger batch favours an arm."""
    items = []
    for mine in parts(rows[rows["source"] == "measured"], "varied", "arm").values() if len(rows) else ():
        several = mine.sort_values("batch", kind="stable")
        speeds = [
            f"{row.median:.0%} of DDP's speed at {row.batch:g} rows a step" for row in each(several.iloc[[0, -1]])
        ]
        items.append(f"- {mine['varied'].iloc[0]}, {mine['arm'].iloc[0]}: {', '.join(speeds)}")
    return "\n".join(items) or NO_TIMES


@style.figure
def figure_of_batches(rows: pd.DataFrame) -> Figure:
    """Speed relative to DDP's as the batch grows, by rows per pass and passes per step, with document 000's numbers."""
    measured = rows[rows["source"] == "measured"]
    varieties = parts(measured, "varied")
    drawing, axes = style.panels([2.2] * len(varieties), sharex=True)
    for ax, (varied, mine) in zip(axes, varieties.items(), strict=True):
        for row in each(rows[rows["source"] != "measured"]):
            start = row.batch
            end = max(row.to, 1.35 * row.batch)
            ax.plot([start, end], [row.median] * 2, color=colour(row.arm), solid_capstyle="butt", **BAR)
        for points in parts(mine, "group", "arm").values():
            curve(ax, "batch", points.sort_values("batch", kind="stable"))
        ax.axhline(1, color=INK, linewidth=0.8)
        ax.set(xscale="log", ylabel="speed (DDP = 100%)")
        ax.yaxis.set_major_formatter(PercentFormatter(1, 0))
        alike = list(mine["group"].unique())
        which = conditions(alike[0]) if len(alike) == 1 else f"{len(alike)} groups of runs, a line for each"
        style.headed(ax, f"varied: {varied} ({which})")
    axes[-1].set_xlabel("rows in a step, all ranks together")
    axes[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes[-1].xaxis.set_minor_formatter(NullFormatter())
    marks = {"document 000 (eight H100)": {"color": FAINT} | BAR}
    return style.finished(drawing, style.keys(rows["arm"], marks), note(measured))


# --- as the model grows: document 002, figure 2 --------------------------------------------------------------------


def ladder(runs: Runs, base: str = "single", other: str = "zero3_cpu") -> pd.DataFrame:
    """Return the seconds of a step as the model grows, and the speed-up by the other arm."""
    rows = []
    chosen = [run for run in timed(runs) if run.arm in (base, other) and run.parameters and run.kind == "real"]
    for group, members in split_by_ranks(groups(chosen, without=("model", *SET_BY_MODEL))).items():
        by_model = by(sorted(members, key=lambda run: run.parameters), "model", "parameters")
        for (model, parameters), mine in by_model.items() if len(by_model) > 1 else ():
            place = {"group": group, "model": model, "parameters": parameters, "weights_gb": 4 * parameters / 1e9}
            of_arm = {arm: seconds(run for run in mine if run.arm == arm) for arm in (base, other)}
            for arm, values in of_arm.items():
                if values:
                    rows.append(place | {"what": "step_s", "arm": arm} | middle(values))
            if all(of_arm.values()):
                ratio = middle(of_arm[base], of_arm[other])
                gain = {name: ratio[name] and ratio[name] - 1 for name in ("median", "low", "high")}
                rows.append(place | {"what": "speed-up", "arm": other} | ratio | gain)
    return pd.DataFrame(rows)


def sentence_of_ladder(rows: pd.DataFrame) -> str:
    """Return the speed-up of each model."""
    ups = rows[rows["what"] == "speed-up"].sort_values("parameters", kind="stable") if len(rows) else rows
    if ups.empty:
        return NO_TIMES
    gains = ", ".join(f"{row.median:+.0%} ({row.model}, {row.weights_gb:.3g} GB of weights)" for row in each(ups))
    printed = f"{SMALLEST_SPEEDUP_002:+.0%} for its smallest, and a gain beyond {WORTHWHILE_FROM_BYTES_002 / 1e9:g} GB"
    return f"The speed-up by {ups['arm'].iloc[0]} is **{gains}**. The document prints {printed}."


@style.figure
def figure_of_ladder(rows: pd.DataFrame) -> Figure:
    """Seconds of a step and the speed-up as the model grows, with the values that document 002 prints."""
    drawing, (above, below) = style.panels([2.1, 2.1], sharex=True)
    for mine in parts(rows, "what", "group", "arm").values():
        curve(below if mine["what"].iloc[0] == "speed-up" else above, "weights_gb", mine)
    first = rows[(rows["what"] == "step_s") & (rows["arm"] == rows["arm"].iloc[0])]
    for row in each(first):
        above.annotate(row.model, (row.weights_gb, row.median), (7, -8), textcoords="offset points", fontsize=8.5)
    sizes = rows["weights_gb"]
    from_gb = WORTHWHILE_FROM_BYTES_002 / 1e9
    below.axhline(0, color=INK, linewidth=0.8)
    below.axvspan(from_gb, max(10 * from_gb, 1.5 * sizes.max()), color=SHADE, alpha=0.6, linewidth=0)
    below.plot(sizes.min(), SMALLEST_SPEEDUP_002, "_", color=INK, markersize=16, markeredgewidth=2.2)
    above.set(yscale="log", xscale="log", ylabel="seconds of a step")
    above.margins(y=0.18)  # the names stand below their points
    below.set(ylabel="speed-up by ZeRO", xlabel="weights in fp32 (GB)")
    below.yaxis.set_major_formatter(PercentFormatter(1, 0))
    style.plain(above.yaxis)
    style.plain(below.xaxis)
    style.headed(above, " and ".join(rows["group"].unique()))
    marks: dict[str, style.Look] = {
        "document 002: its smallest model": {"color": INK, "marker": "_", "linestyle": "", "markersize": 12},
        "document 002: faster in this range": {"color": SHADE, "linewidth": 7},
    }
    text = "Lines join the models of a family. The document prints only the two marked values of its figure."
    return style.finished(drawing, style.keys(rows["arm"], marks), f"{note(rows)} {text}", 2)


# --- against memory: what offloading saves, and what it costs ------------------------------------------------------


def frontier(runs: Runs) -> pd.DataFrame:
    """Return the seconds of a step and the peak memory of each arm."""
    rows = []
    known = [run for run in timed(runs) if run.peak_bytes]
    for group, members in split_by_ranks(groups(known), with_lone=True).items():
        if len({run.arm for run in members}) < 2:
            continue
        for line, mine in lines(members).items():
            place = {"group": group, "line": line} | columns(mine[0], "arm", "ranks", "kind")
            place |= {"peak_bytes": max(run.peak_bytes or 0 for run in mine)}
            place |= columns(mine[0], "peak_of", "rows_per_step")
            rows.append(place | middle(seconds(mine)))
    return pd.DataFrame(rows)


def sentence_of_frontier(rows: pd.DataFrame, most: int = 2) -> str:
    """Return the fastest and the smallest arm of `most` groups."""
    sentences = []
    for mine in largest_groups(rows, most):
        fast, small = least(mine, "median"), least(mine, "peak_bytes")
        texts = [f"{row['median']:.3g} s per step, {size(row['peak_bytes'])}" for row in (fast, small)]
        text = f"{fast['line']} is the fastest ({texts[0]}) and {small['line']} holds the least ({texts[1]})"
        sentences.append(f"In {conditions(mine['group'].iloc[0])}, {text}.")
    return " ".join(sentences) or NO_TIMES


@style.figure
def figure_of_frontier(rows: pd.DataFrame) -> Figure:
    """Seconds of a step against peak memory, one point for each arm."""
    drawing, (ax,) = style.panels([3.2])
    for row in each(rows):
        style.point(ax, row.peak_bytes / 1e6, row, markersize=8)
    in_order = rows.sort_values("peak_bytes", kind="stable")
    best = in_order[in_order["median"] < in_order["median"].cummin().shift(fill_value=np.inf)]
    marks: dict[str, style.Look] = {"the frontier": {"color": FAINT, "linestyle": ":"}}
    if (rows["kind"] != "real").any():
        marks["emulated smaller device"] = OPEN
    ax.step(best["peak_bytes"] / 1e6, best["median"], where="post", linewidth=1, zorder=0, color=FAINT, linestyle=":")
    whose = "a rank, as PyTorch allocated it on the GPU"
    ax.set(xlabel=f"peak memory of {whose} (MB)", ylabel="seconds of a step", xscale="log", yscale="log")
    style.plain(ax.xaxis)
    style.plain(ax.yaxis)
    style.headed(ax, rows["group"].iloc[0])
    return style.finished(drawing, style.keys(rows["arm"], marks), note(rows))


# --- one setting varied, and what saving leaves --------------------------------------------------------------------


def varied(runs: Runs, setting: str) -> pd.DataFrame:
    """Return losses, seconds, memory and bytes of each value of a setting, with all else equal."""
    rows = []
    chosen = [run for run in runs.done if run.kind == "real" and not run.record.is_script]
    for group, members in groups(chosen, without=(setting,)).items():
        alike = by(members, *({"arm", "ranks"} - {setting})).values()
        if any(len({run.value(setting) for run in mine}) > 1 for mine in alike):
            for (arm, value, ranks), mine in by(members, "arm", setting, "ranks").items():
                row = {"group": group, "arm": arm, setting: value, "ranks": ranks, "n": len(mine)}
                of_runs = [row_of(run) for run in mine]
                known = {name: [each[name] for each in of_runs if each[name] is not None] for name in MEASURED}
                known["step_s"] = seconds(run for run in mine if run.device == "cuda")
                medians = {name: statistics.median(values) if values else math.nan for name, values in known.items()}
                rows.append(row | medians | {"peak_mb": max(known["peak_mb"], default=math.nan)})
    return pd.DataFrame(rows).rename(columns={"loss": "final_loss"}).dropna(axis="columns", how="all")


def row_of(run: Run) -> dict:
    """Return a run as the list of all runs shows it. What is not known is None."""
    evaluations = run.record.loss.eval
    about = columns(run, "status", "kind", "arm", "task", "model", "precision", "ranks")
    results = {
        "loss": run.losses[-1] if run.losses else None,
        "eval_loss": evaluations[-1].eval_loss if evaluations else None,
        "step_s": run.median_step_s,
        "peak_mb": run.peak_bytes / 1e6 if run.peak_bytes else None,
        "peak_of": run.peak_of,
        "moved_mb": sum(run.traffic.values()) / 1e6 if run.traffic else None,
    }
    return {"run": run.name} | about | results | columns(run, "micro_batch", "accumulation", "seed")


def saved(runs: Runs) -> pd.DataFrame:
    """Return what `--save` left on the disk, and whether the model was built in parts."""
    rows = []
    for run in runs.done:
        if left := run.record.observed.saved:
            about = columns(run, "arm", "precision", "model", "parameters")
            about |= {"built_in_parts": run.record.observed.built_in_parts, "saved_mb": left.bytes / 1e6}
            rows.append(about | {"parameters_saved": left.parameters, "as": ", ".join(left.dtypes)})
    return pd.DataFrame(rows)


# --- equal cells on several machines -------------------------------------------------------------------------------

FIRST_COLUMNS = ("arm", "model", "environment", "runs", "step_s", "low", "high", "vs_a", "peak_mb", "loss")
PLAIN = {"s/step": "step_s", "from": "low", "to": "high", "vs A": "vs_a", "peak MB": "peak_mb", "peak of": "peak_of"}
PLAIN |= {"eval loss": "eval_loss", "measure_version": "instruments"}


def machines(runs: Runs) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return equal cells in each environment, and the environments by their letters; columns that differ come first."""
    compared = compare(runs)
    places = pd.DataFrame([{"environment": letter} | place for letter, place in compared.environments.items()])
    differ = [str(name) for name in places if places[name].astype(str).nunique() > 1]
    cells = pd.DataFrame(compared.rows).rename(columns=PLAIN)
    first = [name for name in FIRST_COLUMNS if name in cells]
    places = places[[*differ, *(name for name in places if name not in differ)]].rename(columns=PLAIN)
    return cells[[*first, *(name for name in cells if name not in first)]], places


@style.figure
def figure_of_machines(rows: pd.DataFrame) -> Figure:
    """Seconds of a step in each environment, divided by those in environment A, one point for each cell."""
    compared = rows[rows["vs_a"].notna() & (rows["environment"] != "A")]
    places = {f"environment {name}": mine for name, mine in parts(compared, "environment").items()}
    drawing, (ax,) = style.panels([1.0 + 0.5 * len(places)])
    style.strips(ax, places, "vs_a", 0.15)
    ax.axvline(1, color=INK, linewidth=0.8)
    ax.set(xscale="log", xlabel="seconds of a step (1 = the same cell in environment A)")
    style.plain(ax.xaxis)
    ratios = compared["vs_a"]
    title = f"A step takes {ratios.min():.2g} to {ratios.max():.2g} times as long as in environment A"
    style.headed(ax, "equal cells", title)
    text = "Each point is one cell. Environments differ in machine, software or commit, and were measured at different"
    return style.finished(drawing, style.keys(compared["arm"]), f"{text} times: small differences may be noise.")
