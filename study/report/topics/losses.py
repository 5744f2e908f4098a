"""Losses: how far each arm is from the baseline, step by step."""

from collections.abc import Collection
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from study.io.numbers import nats
from study.records.compare import baseline_arm, loss_distances, loss_partner
from study.records.groups import groups, lines
from study.records.runs import Run, Runs
from study.report import style
from study.report.grouping import columns, largest, parts
from study.report.style import EXACT, colour, conditions, marker

DASH = 4  # points: lines that coincide alternate as dashes of this length
NEAR = 0.02  # share of the drawn range: lines that differ by less coincide


def table(runs: Runs, baseline: str = "ddp", tasks: Collection[str | None] = ()) -> pd.DataFrame:
    """Return the loss of every step of every run, and its difference from that of the baseline's run of the same seed.

    In a group without the baseline, the plainest arm takes its place; `against` names it. Runs with other rows per step
    than the baseline are not compared.
    """
    chosen = [run for run in runs.done if run.losses and not run.virtual and not run.record.is_script]
    rows = []
    for group, members in groups(run for run in chosen if not tasks or run.task in tasks).items():
        reference = baseline_arm(members, baseline)
        for line, repeats in lines(members).items():
            for run in repeats:
                rows.append(_curve(group, line, run, loss_partner(run, members, reference)))
    return pd.concat(rows, ignore_index=True) if rows else pd.DataFrame()


def _curve(group: str, line: str, run: Run, other: Run | None) -> pd.DataFrame:
    about: dict[str, Any] = {"group": group, "line": line, "arm": run.arm, "run": run.name}
    about |= columns(run, "seed", "rows_per_step", "kind")
    losses = np.array(run.losses, dtype=float)
    difference = loss_distances(run, other) if other else np.full(len(losses), np.nan)
    about |= {"step": np.arange(1, len(losses) + 1), "loss": losses, "difference": difference}
    return pd.DataFrame(about | {"against": other.arm if other else None})


def parity(rows: pd.DataFrame) -> pd.DataFrame:
    """Return for each line its largest difference from the baseline, and how far the baseline's seeds are apart."""
    if rows.empty:
        return rows
    place = ["group", "line"]
    of_line = rows.groupby(place, sort=False)
    table = of_line.agg(arm=("arm", "first"), n=("run", "nunique"), steps=("step", "max"))
    last = rows[rows["step"] == of_line["step"].transform("max")]
    table["final_loss"] = last.groupby(place)["loss"].median()
    against = rows.dropna(subset="against").groupby(place)["against"].unique()
    table["against"] = against.map(lambda arms: ", ".join(sorted(arms)))
    table["largest_difference"] = of_line["difference"].max()
    apart = {group: _seeds_apart(members) for group, members in parts(rows, "group").items()}
    table["seeds_differ_by"] = table.index.get_level_values("group").map(apart)
    return table.assign(seeds_differ_by=table["seeds_differ_by"].where(of_line["difference"].count() > 0)).reset_index()


def _seeds_apart(rows: pd.DataFrame) -> float | None:
    """Return the spread of the baseline's losses over seeds (median over steps); None with one seed."""
    references = rows[rows["arm"].isin(rows["against"].dropna().unique())]
    if references.empty:
        return None
    medians = references.groupby(["line", "rows_per_step", "step", "seed"])["loss"].median().unstack("seed")
    spreads = (medians.max(axis=1) - medians.min(axis=1))[medians.count(axis=1) > 1]
    return float(spreads.median()) if len(spreads) else None


def sentence(rows: pd.DataFrame) -> str:
    """Return how far the arms of `parity` are apart, and how far seeds are."""
    if rows.empty:
        return ""
    compared = rows[rows["largest_difference"].notna()]
    if compared.empty:
        return "No losses are compared: no two arms here have runs with the same seed, rows per step and steps."
    worst = largest(compared, "largest_difference")
    furthest = f"{worst['line']} against {worst['against']} in {conditions(worst['group'])}"
    text = f"**At every step, losses are within {nats(worst['largest_difference'])} of the baseline's** (furthest:"
    text += f" {furthest}). Half of the {len(compared)} comparisons are within"
    text += f" {nats(compared['largest_difference'].median())}."
    seeds = compared["seeds_differ_by"].dropna()
    if len(seeds):
        text += f" For comparison, another seed alone changes the loss by {seeds.median():.2g} (median over steps)."
    return text


def furthest(rows: pd.DataFrame) -> pd.Series | None:
    """Return the row with the largest difference from the baseline; None if nothing is compared."""
    if rows.empty or rows["difference"].isna().all():
        return None
    return largest(rows, "difference")


@style.figure
def figure(rows: pd.DataFrame) -> Figure:
    """Training loss of every arm at each step, and how far it is from the baseline's loss, one point per step."""
    of_line = parts(rows, "line")
    others = parts(rows[rows["difference"].notna()], "line")
    drawing, axes = style.panels([2.3, 0.75 + 0.22 * len(others)] if others else [2.5])
    for together in _coinciding(of_line):
        gap = DASH * (len(together) - 1)
        for place, mine in enumerate(together):
            band(axes[0], mine, colour(mine["arm"].iloc[0]), linestyle=(DASH * place, (DASH, gap)) if gap else "-")
    style.headed(axes[0], rows["group"].iloc[0])
    axes[0].set(xlabel="optimizer step", ylabel="training loss (nats)")
    n = rows.groupby("line").agg(n=("run", "nunique"))
    text = f"Lines: means over runs ({style.counted(n)}). Bands: from the lowest to the highest run."
    text += " Lines that coincide alternate as dashes."
    if others:
        _draw_distances(axes[1], others)
        text += " Lower panel: the largest difference of any run at each step."
    usual = rows["rows_per_step"].mode()[0]
    entries = []
    for line, mine in of_line.items():
        first = mine.iloc[0]
        (entry,) = style.keys([first["arm"]])
        size = first["rows_per_step"]
        entry.set_label(line if size == usual else f"{line}, {size:g} rows/step")
        entries.append(entry)
    return style.finished(drawing, entries, text)


def _coinciding(rows_of: dict[str, pd.DataFrame]) -> list[list[pd.DataFrame]]:
    """Return lines that look like one: their means never differ by more than a share of the drawn range."""
    means = {line: mine.groupby("step")["loss"].mean() for line, mine in rows_of.items()}
    everything = pd.concat(means.values())
    least = NEAR * (everything.max() - everything.min())
    together: dict[str, list[pd.DataFrame]] = {}  # by the first of them
    for line, curve in means.items():
        near = (first for first in together if (means[first] - curve).abs().max() <= least)
        together.setdefault(next(near, line), []).append(rows_of[line])
    return list(together.values())


def _draw_distances(ax: Axes, rows_of: dict[str, pd.DataFrame]) -> None:
    """Draw a row for each arm, a point for each step, on a logarithmic axis that has a place for zero."""
    for place, (line, mine) in enumerate(rows_of.items()):
        arm = mine["arm"].iloc[0]
        largest = mine.groupby("step")["difference"].max().clip(lower=EXACT)
        look: dict[str, Any] = {"color": colour(arm), "markersize": 4, "alpha": 0.6, "linestyle": ""}
        (points,) = ax.plot(largest, [place] * len(largest), marker(arm), **look)
        style.set_tooltip(points, arm, f"{line}: at most {nats(mine['difference'].max())}, in {len(largest)} steps")
    against = ", ".join(sorted(pd.concat(rows_of.values())["against"].dropna().unique()))
    style.name_bars(ax, rows_of)
    ax.set(xscale="log", xlabel=f"difference from {against}'s loss at each step (nats)", xlim=(EXACT / 1.6, None))
    ax.margins(y=0.08)
    style.from_zero(ax.xaxis)


def band(ax: Axes, rows: pd.DataFrame, tone: str, name: str = "loss", **look: Any) -> None:
    """Draw the mean over runs at each step as a line, from the smallest to the largest value as a band."""
    values = rows.groupby("step", sort=False)[name].agg(["min", "mean", "max"])
    if (values["min"] < values["max"]).any():
        ax.fill_between(values.index, values["min"], values["max"], color=tone, alpha=0.15, linewidth=0)
    (line,) = ax.plot(values.index, values["mean"], color=tone, **look)
    first = rows.iloc[0]
    ends = f"from {values['mean'].iloc[0]:.4g} to {values['mean'].iloc[-1]:.4g}"
    style.set_tooltip(line, first.get("arm", ""), f"{first.get('line', '')}: {ends}")
