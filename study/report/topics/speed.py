"""Seconds of a step, and beside them the memory that they buy."""

from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from study.records import compare, metrics
from study.records.groups import groups, lines
from study.records.runs import Run, Runs
from study.report import style
from study.report.style import FAINT, PUBLISHED, colour
from study.report.tables import columns, split_by_ranks


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


def middle(values: list[float]) -> dict[str, float | None]:
    """Return a median over runs with its interval, where there are enough runs, and their number."""
    median, low, high = compare.median_with_interval(values, np.random.default_rng(0))
    known: dict[str, float | None] = {"median": median, "low": low, "high": high, "n": len(values)}
    # With fewer runs an interval would say more than is known.
    if len(values) < compare.FEWEST_RUNS:
        known |= {"low": None, "high": None}
    return known


def frontier(runs: Runs) -> pd.DataFrame:
    """Return the seconds of a step and the peak memory of each arm: what offloading saves, and what it costs."""
    rows = []
    known = split_by_ranks(groups([run for run in timed(runs) if metrics.peak_bytes(run.record)]))
    for group, members in known.items():
        for line, mine in lines(members).items():
            place = {"group": group, "line": line} | columns(mine[0], "arm", "ranks", "kind", "rows_per_step")
            place |= {"peak_bytes": max(metrics.peak_bytes(run.record) or 0 for run in mine)}
            rows.append(place | middle(seconds(mine)))
    return pd.DataFrame(rows)


@style.figure
def figure_of_steps(rows: pd.DataFrame) -> Figure:
    """Seconds of a step under each arm: predicted with their intervals, and what others measured."""
    settings = list(dict.fromkeys(rows["setting"]))
    drawing, axes = style.panels([0.7 + 0.25 * rows["arm"].nunique()] * len(settings))
    arms = style.ordered(rows["arm"])
    for ax, setting in zip(axes, settings, strict=True):
        for row in rows[rows["setting"] == setting].itertuples():
            place = arms.index(row.arm)
            if row.source != "predicted":
                ax.plot(row.seconds, place, **PUBLISHED)
                continue
            ax.plot([row.low, row.high], [place] * 2, color=colour(row.arm), linewidth=2)
            ax.plot(row.seconds, place, "o", color=colour(row.arm), markerfacecolor=style.CARD)
            style.annotate(ax, f"{row.seconds:.2g} s", row.high, place)
        style.name_bars(ax, arms)
        ax.margins(x=0.14, y=0.06)
        ax.set_xlim(left=0)
        ax.set_title(f"Llama-3-8B on eight H100, {setting} in a step")
    axes[-1].set_xlabel("seconds of an optimizer step", loc="right")
    note = "Nothing was measured on a GPU here. DDP would not fit into 80 GB. Others do not say on which GPUs they"
    note += " measured, nor whether activations were recomputed; the data file names them."
    predicted: style.Look = {"color": FAINT, "marker": "o", "markerfacecolor": style.CARD}
    return style.finished(drawing, style.keys({"predicted": predicted, "measured by others": PUBLISHED}), note)
