"""Losses: how far each arm is from the baseline, step by step."""

from collections.abc import Collection
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from study.core.numbers import nats
from study.core.words import joined
from study.records.compare import baseline_arm, loss_distances, loss_partner
from study.records.groups import groups, lines
from study.records.runs import FIRST_OPTIMIZER, Run, Runs
from study.report import style
from study.report.grouping import columns, largest, parts
from study.report.style import EXACT, colour, conditions, marker

LEARNS = 0.95  # of the first loss: a training that ends above it shows little
SMALL = 1e-5  # nats: the order of additions in fp32 explains as much
DASH = 4  # points: lines that coincide alternate as dashes of this length
NEAR = 0.02  # share of the drawn range: lines that differ by less coincide


def table(runs: Runs, baseline: str = "ddp", tasks: Collection[str | None] = ()) -> pd.DataFrame:
    """Return the loss of every step of every run, and its difference from that of the baseline's run of the same seed.

    In a group without the baseline, the plainest arm takes its place; `against` names it. Runs with other rows per step
    than the baseline are not compared.
    """
    chosen = [
        run for run in runs.done if run.record.loss.train and not run.record.is_virtual and not run.record.is_script
    ]
    rows = []
    for group, members in groups(run for run in chosen if not tasks or run.record.requested.task in tasks).items():
        reference = baseline_arm(members, baseline)
        for line, repeats in lines(members).items():
            for run in repeats:
                rows.append(_curve(group, line, run, loss_partner(run, members, reference)))
    return pd.concat(rows, ignore_index=True) if rows else pd.DataFrame()


def _curve(group: str, line: str, run: Run, other: Run | None) -> pd.DataFrame:
    about: dict[str, Any] = {"group": group, "line": line, "arm": run.record.arm, "run": run.record.run_id}
    about |= columns(run, "seed", "rows_per_step", "kind") | {"recipe": _recipe(run)}
    losses = np.array(run.record.loss.train, dtype=float)
    difference = loss_distances(run, other) if other else np.full(len(losses), np.nan)
    about |= {"step": np.arange(1, len(losses) + 1), "loss": losses, "difference": difference}
    return pd.DataFrame(about | {"against": other.record.arm if other else None})


def _recipe(run: Run) -> str:
    """Return what rounding depends on."""
    if run.record.requested.optimizer not in (None, FIRST_OPTIMIZER):
        return "with other optimizers"
    return "in fp32 with AdamW" if run.record.requested.precision == "fp32" else "with weights or autocast in 16 bits"


def learning(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the groups whose loss falls: equal losses of a training that learns nothing show little. Else all."""
    chosen = []
    for mine in parts(rows, "group").values():
        curve = mine.groupby("step")["loss"].median()
        if curve.iloc[-max(1, len(curve) // 4) :].mean() < LEARNS * curve.iloc[0]:
            chosen.append(mine)
    return pd.concat(chosen) if chosen else rows


def parity(rows: pd.DataFrame) -> pd.DataFrame:
    """Return for each line its largest difference from the baseline, and how far the baseline's seeds are apart."""
    if rows.empty:
        return rows
    place = ["group", "line"]
    of_line = rows.groupby(place, sort=False)
    table = of_line.agg(arm=("arm", "first"), recipe=("recipe", "first"), n=("run", "nunique"), steps=("step", "max"))
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
    texts = []
    for recipe, mine in parts(compared.sort_values("recipe", kind="stable"), "recipe").items():
        worst = largest(mine, "largest_difference")
        near = mine[mine["largest_difference"] <= SMALL]["largest_difference"]
        furthest = f"{worst['line']} against {worst['against']} in {conditions(worst['group'])}"
        counted = f"{len(near)} of {len(mine)} comparisons are within {nats(near.max())}" if len(near) else ""
        most = f"the furthest, {furthest}, is within {nats(worst['largest_difference'])}" * (len(near) < len(mine))
        texts.append(f"- **{recipe[0].upper()}{recipe[1:]}**: {'; '.join(filter(None, (counted, most)))}.")
    text = "Losses against the baseline's, at every step:\n\n" + "\n".join(texts) + "\n\n"
    seeds = compared["seeds_differ_by"].dropna()
    if len(seeds):
        text += f"For comparison, another seed alone changes the loss by {seeds.median():.2g} (median over steps)."
    return text.strip()


def furthest(rows: pd.DataFrame) -> pd.Series | None:
    """Return the row with the largest difference from the baseline; None if nothing is compared."""
    if rows.empty or rows["difference"].isna().all():
        return None
    return largest(rows, "difference")


@style.figure
def figure(rows: pd.DataFrame) -> Figure:
    """Training loss of every arm at each step, and how far it is from the baseline's loss, one point per step."""
    elsewhere = _on_other_rows(rows)
    rows = rows[~rows["line"].isin(elsewhere)]
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
    if elsewhere:
        text += f" Not drawn, because they train on other rows in a step: {joined(elsewhere)}."
    entries = []
    for line, mine in of_line.items():
        (entry,) = style.keys([mine["arm"].iloc[0]])
        entry.set_label(line)
        entries.append(entry)
    return style.finished(drawing, entries, text)


def _on_other_rows(rows: pd.DataFrame) -> list[str]:
    """Return the lines that are not compared, and that nothing is compared with, where others are."""
    compared = rows[rows["difference"].notna()]
    drawn = {*compared["line"], *rows[rows["arm"].isin(compared["against"])]["line"]}
    return [line for line in rows["line"].unique() if line not in drawn] if drawn else []


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
    for place, mine in enumerate(rows_of.values()):
        arm = mine["arm"].iloc[0]
        largest = mine.groupby("step")["difference"].max().clip(lower=EXACT)
        look: dict[str, Any] = {"color": colour(arm), "markersize": 4, "alpha": 0.6, "linestyle": ""}
        ax.plot(largest, [place] * len(largest), marker(arm), **look)
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
    ax.plot(values.index, values["mean"], color=tone, **look)
