"""Seconds of a step: against memory, with one setting varied, and on several machines.

Ratios are of runs in one environment. Two environments are only compared cell by cell.
"""

import math
import statistics
from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from study.core.numbers import size
from study.records import compare as comparing
from study.records import metrics
from study.records.compare import compare
from study.records.groups import by, groups, lines
from study.records.runs import Run, Runs
from study.report import style
from study.report.grouping import ORDER, SET_BY_MODEL, columns, each, largest_groups, least, split_by_ranks
from study.report.style import FAINT, OPEN, conditions

NO_TIMES = "**No times are compared:** no run here was on a GPU, and seconds of a CPU say nothing about GPUs."
NO_TIMES += " `study estimate` predicts them."
MEASURED = ("loss", "step_s", "peak_mb", "moved_mb")


def timed(runs: Runs) -> list[Run]:
    """Return the finished runs whose seconds say something of other machines: on GPUs, or on links of a known speed."""
    return [
        run
        for run in runs.done
        if metrics.value(run.record, "step_s")
        and not run.record.is_virtual
        and (run.record.observed.device == "cuda" or run.record.requested.hosts)
    ]


def seconds(runs: Iterable[Run]) -> list[float]:
    """Return the median seconds of a step of each run that has them."""
    return [metrics.value(run.record, "step_s") for run in runs if metrics.value(run.record, "step_s")]


def middle(values: list[float], over: list[float] | None = None) -> dict:
    """Return a median over runs, or a ratio of two, with its interval where there are enough runs, and their number."""
    rng = np.random.default_rng(0)
    if over is None:
        n = len(values)
        median, low, high = comparing.median_with_interval(values, rng)
    else:
        n = min(len(values), len(over))
        median, low, high = comparing.ratio_of_medians(values, over, rng)
    enough = n >= comparing.FEWEST_RUNS
    return {"median": median, "low": low if enough else None, "high": high if enough else None, "n": n}


def note(rows: pd.DataFrame) -> str:
    """Return what the points of a figure are: medians of how many runs, and whether they have intervals."""
    with_intervals = rows["low"].notna().any()
    intervals = f"95 % intervals from {comparing.FEWEST_RUNS} runs on" if with_intervals else "too few for intervals"
    return f"Points: medians over runs, {style.counted(rows)}, {intervals}."


# --- against memory: what offloading saves, and what it costs ------------------------------------------------------


def frontier(runs: Runs) -> pd.DataFrame:
    """Return the seconds of a step and the peak memory of each arm."""
    rows = []
    known = [run for run in timed(runs) if metrics.peak_bytes(run.record)]
    for group, members in split_by_ranks(groups(known), with_lone=True).items():
        if len({run.record.arm for run in members}) < 2:
            continue
        for line, mine in lines(members).items():
            place = {"group": group, "line": line} | columns(mine[0], "arm", "ranks", "kind")
            place |= {"peak_bytes": max(metrics.peak_bytes(run.record) or 0 for run in mine)}
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
    for group, members in groups(chosen, without=(setting, *SET_BY_MODEL * (setting == "model"))).items():
        alike = by(members, *({"arm", "ranks"} - {setting})).values()
        if any(len({run.facts[setting] for run in mine}) > 1 for mine in alike):
            for (arm, value, ranks), mine in by(members, "arm", setting, "ranks").items():
                row = {"group": group, "arm": arm, setting: value, "ranks": ranks, "n": len(mine)}
                of_runs = [row_of(run) for run in mine]
                known = {name: [each[name] for each in of_runs if each[name] is not None] for name in MEASURED}
                known["step_s"] = seconds(run for run in mine if run.record.observed.device == "cuda")
                medians = {name: statistics.median(values) if values else math.nan for name, values in known.items()}
                rows.append(row | medians | {"peak_mb": max(known["peak_mb"], default=math.nan)})
    if not rows:
        return pd.DataFrame()
    table = pd.DataFrame(rows).rename(columns={"loss": "final_loss"}).dropna(axis="columns", how="all")
    groups_in_order = {group: place for place, group in enumerate(table["group"].unique())}
    places = table.assign(group=table["group"].map(groups_in_order), arm=table["arm"].map(ORDER))
    return table.loc[places.sort_values(["group", "arm", setting], kind="stable").index]


def row_of(run: Run) -> dict:
    """Return a run as the list of all runs shows it. What is not known is None."""
    evaluations = run.record.loss.eval
    about = columns(run, "status", "kind", "arm", "task", "model", "precision", "ranks")
    results = {
        "loss": run.record.loss.train[-1] if run.record.loss.train else None,
        "eval_loss": evaluations[-1].eval_loss if evaluations else None,
        "step_s": metrics.value(run.record, "step_s"),
        "peak_mb": (metrics.peak_bytes(run.record) or 0) / 1e6 or None,
        "peak_of": metrics.peak_of(run.record),
        "moved_mb": sum(metrics.sent(run.record).values()) / 1e6 or None,
    }
    return {"run": run.record.run_id} | about | results | columns(run, "micro_batch", "accumulation", "seed")


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


def in_several(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the cells of `machines` that were run in several environments."""
    settings = [name for name in cells if name in FIRST_COLUMNS[:2] or name not in (*FIRST_COLUMNS, *PLAIN.values())]
    settings = [name for name in settings if name != "seeds"]
    return cells[cells[settings].astype(str).duplicated(keep=False)] if len(cells) else cells


def machines(runs: Runs) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return equal cells in each environment, and the environments by their letters; columns that differ come first."""
    compared = compare(runs)
    places = pd.DataFrame([{"environment": letter} | place for letter, place in compared.environments.items()])
    differ = [str(name) for name in places if places[name].astype(str).nunique() > 1]
    cells = pd.DataFrame(compared.rows).rename(columns=PLAIN)
    first = [name for name in FIRST_COLUMNS if name in cells]
    places = places[[*differ, *(name for name in places if name not in differ)]].rename(columns=PLAIN)
    return cells[[*first, *(name for name in cells if name not in first)]], places
