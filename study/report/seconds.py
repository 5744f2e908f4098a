"""Seconds of a step: which runs have them, their medians over runs, and how figures draw these."""

from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes

from study.records import stats
from study.records.runs import Run, Runs
from study.report import style
from study.report.style import colour


def timed(runs: Runs) -> list[Run]:
    return [run for run in runs.done if run.median_step_s and not run.virtual]


def of(runs: Iterable[Run]) -> list[float]:
    return [run.median_step_s for run in runs if run.median_step_s]


def middle(values: list[float], over: list[float] | None = None) -> dict:
    """A median over runs, or a ratio of two, with its interval where there are enough runs, and how many there are."""
    samples = [values] if over is None else [values, over]
    median, low, high, n = stats.median(values), None, None, min(map(len, samples))
    if over:
        median /= stats.median(over)
    if n >= stats.FEWEST_RUNS:
        interval = stats.ratio_of_medians if over else stats.median_with_interval
        _, low, high = interval(*samples, np.random.default_rng(0))
    return {"median": median, "low": low, "high": high, "n": n}


def note(rows: list[dict]) -> str:
    """What the points of a figure are: medians of how many runs, and whether they have intervals."""
    with_intervals = any(row["low"] is not None for row in rows)
    intervals = f"95 % intervals from {stats.FEWEST_RUNS} runs on" if with_intervals else "too few for intervals"
    return f"Points: medians over runs, {style.counted(rows)}, {intervals}."


def curve(ax: Axes, x: str, rows: list[dict]) -> None:
    """The medians of one arm as points on a line."""
    ax.plot([row[x] for row in rows], [row["median"] for row in rows], color=colour(rows[0]["arm"]), linewidth=1)
    for row in rows:
        style.point(ax, row[x], row)
