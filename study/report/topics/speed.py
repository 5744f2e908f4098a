"""Seconds of a step: against memory, and with one setting varied. Ratios are of runs in one environment."""

from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from study.records import compare, metrics
from study.records.groups import by, groups, lines
from study.records.runs import Run, Runs
from study.report import style
from study.report.grouping import ORDER, SET_BY_MODEL, columns, split_by_ranks
from study.report.style import FAINT, PUBLISHED, colour


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


def middle(values: list[float]) -> dict:
    """Return a median over runs with its interval, where there are enough runs, and their number."""
    median, low, high = compare.median_with_interval(values, np.random.default_rng(0))
    enough = len(values) >= compare.FEWEST_RUNS
    return {"median": median, "low": low if enough else None, "high": high if enough else None, "n": len(values)}


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
    return style.finished(drawing, style.keys([], {"predicted": predicted, "measured by others": PUBLISHED}), note)


def varied(runs: Runs, setting: str) -> pd.DataFrame:
    """Return losses, seconds, memory and bytes of each value of a setting, with all else equal."""
    rows = []
    chosen = [run for run in runs.done if run.kind == "real" and not run.record.is_script]
    for group, members in groups(chosen, without=(setting, *SET_BY_MODEL * (setting == "model"))).items():
        alike = by(members, *({"arm", "ranks"} - {setting})).values()
        if any(len({run.facts[setting] for run in mine}) > 1 for mine in alike):
            rows += [{"group": group, "order": ORDER[run.record.arm]} | _row(run, setting) for run in members]
    if not rows:
        return pd.DataFrame()
    place = ["group", "order", "arm", setting, "ranks"]
    place = list(dict.fromkeys(place))
    table = pd.DataFrame(rows).groupby(place, sort=False, dropna=False)
    medians = table.median().assign(peak_mb=table["peak_mb"].max(), n=table.size()).reset_index()
    in_order = medians.sort_values(["order", setting], kind="stable").drop(columns="order")
    return in_order.sort_values("group", kind="stable").dropna(axis="columns", how="all")


def _row(run: Run, setting: str) -> dict:
    """Return what a run measured, with unknown numbers as NaN. Seconds of a CPU say nothing about GPUs."""
    peak_bytes = metrics.peak_bytes(run.record)
    measured = {
        "final_loss": run.record.loss.train[-1] if run.record.loss.train else None,
        "step_s": metrics.value(run.record, "step_s") if run.record.observed.device == "cuda" else None,
        "peak_mb": peak_bytes / 1e6 if peak_bytes else None,
        "moved_mb": sum(metrics.sent(run.record).values()) / 1e6 or None,
    }
    return columns(run, "arm", setting, "ranks") | {name: np.nan if v is None else v for name, v in measured.items()}
