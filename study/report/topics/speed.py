"""Seconds of a step: as the batch grows, as the model grows, against memory, one setting varied, on several machines.

Ratios are of runs in one environment. Two environments are only compared cell by cell.
"""

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
from study.report.style import FAINT, INK, OPEN, SHADE, colour, conditions, ordered

VARIED = {"micro_batch": "rows per pass", "accumulation": "passes per step"}
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
    """Return the finished runs whose seconds were measured."""
    return [run for run in runs.done if run.median_step_s and not run.virtual]


def seconds(runs: Iterable[Run]) -> list[float]:
    """Return the median seconds of a step of each run that has them."""
    return [run.median_step_s for run in runs if run.median_step_s]


def middle(values: list[float], over: list[float] | None = None) -> dict:
    """Return a median over runs, or a ratio of two, with its interval where there are enough runs, and their number."""
    rng = np.random.default_rng(0)
    n = len(values) if over is None else min(len(values), len(over))
    if over is None:
        median, low, high = stats.median(values), None, None
        if n >= stats.FEWEST_RUNS:
            _, low, high = stats.median_with_interval(values, rng)
    else:
        median, low, high = stats.median(values) / stats.median(over), None, None
        if n >= stats.FEWEST_RUNS:
            _, low, high = stats.ratio_of_medians(values, over, rng)
    return {"median": median, "low": low, "high": high, "n": n}


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
            rows += _batches_of_group(group, members, setting, baseline)
    for band in BATCHES_000 if rows else ():
        place = {"varied": "batch", "value": band["from"], "batch": band["from"], "ranks": 8, "n": 0}
        place |= {"source": "document 000", "from": band["from"], "to": band["to"]}
        rows += [place | {"arm": arm, "median": band[arm]} for arm in ("zero2", "zero3")]
    return pd.DataFrame(rows)


def _batches_of_group(group: str, members: list[Run], setting: str, baseline: str) -> list[dict]:
    rows = []
    baselines = by([run for run in members if run.arm == baseline], "ranks")
    varied = [ranks for (ranks,), mine in baselines.items() if len({run.value(setting) for run in mine}) > 1]
    for (value, ranks), mine in by([run for run in members if run.ranks in varied], setting, "ranks").items():
        of_arm = by(mine, "arm")
        base = of_arm.pop((baseline,), [])
        for (arm,), repeats in of_arm.items() if base else ():
            place = {"group": group, "varied": VARIED[setting], "arm": arm, "value": value, "ranks": ranks}
            place |= {"batch": repeats[0].rows_per_step, "source": "measured"}
            rows.append(place | middle(seconds(base), seconds(repeats)))
    return rows


def sentence_of_batches(rows: pd.DataFrame) -> str:
    """Return whether a larger batch favours an arm."""
    items = []
    for mine in parts(rows[rows["source"] == "measured"], "varied", "arm").values() if len(rows) else ():
        if len(mine) > 1:
            several = mine.sort_values("batch", kind="stable")
            first, last = several.iloc[0], several.iloc[-1]
            small = f"{first['median']:.0%} of DDP's speed at {first['batch']:g} rows a step"
            large = f"{last['median']:.0%} at {last['batch']:g}"
            items.append(f"- {first['varied']}, {first['arm']}: {small}, {large}")
    return "\n".join(items)


def title_of_batches(rows: pd.DataFrame) -> str:
    spans = rows.groupby("arm")["median"].agg(["min", "max"])
    texts = [f"{arm} {spans['min'][arm]:.0%} to {spans['max'][arm]:.0%}" for arm in ordered(rows["arm"])]
    return f"Speed relative to DDP's: {', '.join(texts)}"


@style.figure
def figure_of_batches(rows: pd.DataFrame) -> Figure:
    """Speed relative to DDP's as the batch grows, by rows per pass and passes per step, with document 000's numbers."""
    measured = rows[rows["source"] == "measured"]
    varieties = parts(measured, "varied")
    drawing, axes = style.panels([2.2] * len(varieties), sharex=True)
    for ax, (varied, mine) in zip(axes, varieties.items(), strict=True):
        for row in each(rows[rows["source"] != "measured"]):
            start, end = row.batch, max(row.to, 1.35 * row.batch)
            ax.plot([start, end], [row.median] * 2, color=colour(row.arm), solid_capstyle="butt", **BAR)
        for points in parts(mine, "group", "arm").values():
            curve(ax, "batch", points.sort_values("batch", kind="stable"))
        ax.axhline(1, color=INK, linewidth=0.8)
        ax.set(xscale="log", ylabel="speed (DDP = 100%)")
        ax.yaxis.set_major_formatter(PercentFormatter(1, 0))
        alike = list(mine["group"].unique())
        which = conditions(alike[0]) if len(alike) == 1 else f"{len(alike)} groups of runs, a line for each"
        style.headed(ax, title_of_batches(mine), f"varied: {varied} ({which})")
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
                rows.append(place | {"what": "speed-up", "arm": other} | _faster(of_arm[base], of_arm[other]))
    return pd.DataFrame(rows)


def _faster(base: list[float], other: list[float]) -> dict:
    """Return the speed-up: the ratio of two medians minus one."""
    ratio = middle(base, other)
    return {name: value - 1 if name != "n" and value is not None else value for name, value in ratio.items()}


def sentence_of_ladder(rows: pd.DataFrame) -> str:
    """Return the speed-up of the smallest and of the largest model."""
    if rows.empty or not (rows["what"] == "speed-up").any():
        return ""
    ups = rows[rows["what"] == "speed-up"].sort_values("parameters", kind="stable")
    small = _speed_up(ups.iloc[0], "smallest model")
    large = _speed_up(ups.iloc[-1], "largest here")
    faster = ups[ups["median"] > 0]["model"]
    first = (
        f"The smallest model that is faster with it is {faster.iloc[0]}."
        if len(faster)
        else "No model is faster with it."
    )
    printed = f"{SMALLEST_SPEEDUP_002:+.0%} for its smallest, and a gain beyond {WORTHWHILE_FROM_BYTES_002 / 1e9:g} GB"
    text = f"The speed-up by {ups['arm'].iloc[0]} is {small} of weights) and {large}). {first}"
    return f"{text} The document prints {printed}."


def _speed_up(row: pd.Series, which: str) -> str:
    return f"**{row['median']:+.0%}** for the {which} ({row['model']}, {row['weights_gb']:.3g} GB"


def title_of_ladder(rows: pd.DataFrame) -> str:
    ups = rows[rows["what"] == "speed-up"]
    if ups.empty:
        return "Seconds of a step as the model grows"
    arm = ups["arm"].iloc[0]
    than = "".join(f" than {other}" for other in ordered(rows["arm"]) if other != arm)
    faster = int((ups["median"] > 0).sum())
    if not faster:
        return f"{arm} is slower{than} for every model that was tried"
    return f"{arm} is faster{than} for {faster} of {len(ups)} models"


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
    style.headed(above, title_of_ladder(rows), " and ".join(rows["group"].unique()))
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
    """Return the fastest and the smallest arm of `most` groups, and what the latter costs."""
    sentences = []
    for mine in largest_groups(rows, most):
        fast, small = least(mine, "median"), least(mine, "peak_bytes")
        speed, held = f"{fast['median']:.3g} s per step", size(fast["peak_bytes"])
        if len(mine) == 1:
            rest = f"only {fast['line']} has timings: {speed}, {held}."
        elif small["peak_bytes"] == fast["peak_bytes"]:
            rest = f"{fast['line']} is the fastest ({speed}) and the smallest ({held})."
        else:
            less, slower = 1 - small["peak_bytes"] / fast["peak_bytes"], small["median"] / fast["median"]
            offloaded = f"{small['line']} holds {less:.0%} less and takes {slower:.2g} times as long."
            rest = f"{fast['line']} is the fastest ({speed}); {offloaded}"
        sentences.append(f"In {conditions(mine['group'].iloc[0])}, {rest}")
    return " ".join(sentences)


def title_of_frontier(rows: pd.DataFrame) -> str:
    fast, small = least(rows, "median"), least(rows, "peak_bytes")
    if small["peak_bytes"] == fast["peak_bytes"]:
        return f"{fast['line']} is the fastest and holds the least"
    slower = small["median"] / fast["median"]
    return f"{small['line']} holds the least and takes {slower:.2g} times as long as {fast['line']}"


@style.figure
def figure_of_frontier(rows: pd.DataFrame) -> Figure:
    """Seconds of a step against peak memory, one point for each arm."""
    drawing, (ax,) = style.panels([3.2])
    sizes = rows["peak_bytes"] / 1e6
    for row in each(rows):
        style.point(ax, row.peak_bytes / 1e6, row, markersize=8)
    in_order = rows.sort_values("peak_bytes", kind="stable")
    best = in_order[in_order["median"] < in_order["median"].cummin().shift(fill_value=np.inf)]
    marks: dict[str, style.Look] = {}
    on_cpu = rows["peak_of"].iloc[0] == "tracked"
    if len(best) > 1:
        marks["nothing is both smaller and faster"] = {"color": FAINT, "linestyle": ":"}
        ax.step(
            best["peak_bytes"] / 1e6, best["median"], where="post", linewidth=1, zorder=0, color=FAINT, linestyle=":"
        )
    whose = "a rank's tensors, in host memory" if on_cpu else "a rank, as PyTorch allocated it on the GPU"
    ax.set(xlabel=f"peak memory of {whose} (MB)", ylabel="seconds of a step", xscale="log", yscale="log")
    style.plain(ax.xaxis)
    style.plain(ax.yaxis)
    style.headed(ax, title_of_frontier(rows), rows["group"].iloc[0])
    if (rows["kind"] != "real").any():
        marks["emulated smaller device"] = OPEN
    text = " On a CPU, host and device share one memory, so offloading saves nothing." if on_cpu else ""
    style.finished(drawing, style.keys([], marks), f"{note(rows)}{text}", 2)
    places = dict(zip(rows["line"], zip(sizes, rows["median"], strict=True), strict=True))
    style.name_points(ax, places, dict(zip(rows["line"], rows["arm"], strict=True)))
    return drawing


# --- one setting varied, and what saving leaves --------------------------------------------------------------------


def varied(runs: Runs, setting: str) -> pd.DataFrame:
    """Return losses, seconds, memory and bytes of each value of a setting, with all else equal."""
    rows = []
    chosen = [run for run in runs.done if run.kind == "real" and not run.record.is_script]
    for group, members in groups(chosen, without=(setting,)).items():
        alike = by(members, *({"arm", "ranks"} - {setting})).values()
        if any(len({run.value(setting) for run in mine}) > 1 for mine in alike):
            for (arm, value, ranks), mine in by(members, "arm", setting, "ranks").items():
                place = {"group": group, "arm": arm, setting: value, "ranks": ranks, "n": len(mine)}
                rows.append(place | _results(mine))
    return pd.DataFrame(rows)


def _results(mine: list[Run]) -> dict:
    first, times = mine[0], seconds(mine)
    return {
        "final_loss": stats.median([run.losses[-1] for run in mine]) if first.losses else None,
        "step_s": stats.median(times) if times else None,
        "peak_mb": max(run.peak_bytes or 0 for run in mine) / 1e6 if first.peak_bytes else None,
        "moved_mb": sum(first.traffic.values()) / 1e6 if first.traffic else None,
    }


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
    return _first(cells, FIRST_COLUMNS), _first(places, differ).rename(columns=PLAIN)


def _first(rows: pd.DataFrame, names: Iterable[str]) -> pd.DataFrame:
    first = [name for name in names if name in rows]
    return rows[[*first, *(name for name in rows if name not in first)]]


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
    style.headed(ax, title, "equal cells")
    text = "Each point is one cell. Environments differ in machine, software or commit, and were measured at different"
    return style.finished(drawing, style.keys(compared["arm"]), f"{text} times: small differences may be noise.")
