"""Losses: how far each arm is from the baseline, step by step."""

from collections.abc import Collection

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import SymmetricalLogLocator

from study.records.compare import loss_distances
from study.records.groups import groups
from study.records.runs import Runs
from study.report import style
from study.report.style import look
from study.report.tables import lines_of, parts

EXACT = 1e-9  # nats: smaller differences are drawn as if the axis were linear
SEEN = 0.01  # of the height of a figure: lines that are nearer lie on one another
DASH = 4  # points: lines alternate as dashes of this length, so that those which coincide are seen


def table(runs: Runs, baseline: str = "ddp", tasks: Collection[str | None] = ()) -> pd.DataFrame:
    """Return the loss of every step of every run, and its difference from that of the baseline's run of the same seed.

    In a group without it the plainest arm takes its place. Runs with other rows per step are not compared.
    """
    if tasks:
        runs = runs.select(task=[*tasks])
    chosen = [run for run in runs.select(virtual=False, script="train").done if run.record.loss.train]
    curves = [pd.DataFrame()]  # so that no runs are an empty table
    for place, repeats, members in lines_of(groups(chosen)):
        for run in repeats:
            losses = run.record.loss.train
            against, distances = loss_distances(run, members, baseline)
            columns = {
                "run": run.record.run_id,
                "seed": run.facts["seed"],
                "against": against,
                "step": np.arange(1, len(losses) + 1),
                "loss": losses,
                "difference": distances or np.nan,
            }
            curves.append(pd.DataFrame(place | columns))
    return pd.concat(curves, ignore_index=True)


def parity(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the first and the last loss of each line, of one seed, and its largest difference over all seeds."""
    if rows.empty:
        return rows
    one_seed = pd.concat([_of_one_seed(group) for _, group in rows.groupby("group", sort=False)])
    ends = one_seed.groupby(["group", "line"], sort=False).agg(
        seed=("seed", "first"), first_loss=("loss", "first"), last_loss=("loss", "last"), steps=("step", "max")
    )
    # The largest over all seeds and steps: one step that differs is a difference.
    table = rows.groupby(["group", "line"], sort=False).agg(
        against=("against", "first"),
        largest_difference=("difference", "max"),
        n=("run", "nunique"),
    )
    together = pd.concat([table[["against"]], ends, table[["largest_difference", "n"]]], axis=1)
    return together.reset_index()


def _of_one_seed(group: pd.DataFrame) -> pd.DataFrame:
    """Return a run of each line, of the seed that most lines have, or else of the first that a line has."""
    # Of other seeds losses differ whatever the arm. Of several seeds the smallest, as repeats come in any order.
    lines_with = group.groupby("seed", dropna=False)["line"].nunique()
    seed = lines_with.idxmax()
    chosen = []
    for mine in parts(group, "line").values():
        of_seed = mine[mine["seed"] == seed]
        first = (of_seed if len(of_seed) else mine)["run"].iloc[0]
        chosen.append(mine[mine["run"] == first])
    return pd.concat(chosen)


@style.figure
def figure(rows: pd.DataFrame) -> Figure:
    """Above: the training loss, a line for each arm. Below: how far it is from the baseline's loss, a point a step."""
    apart = rows[rows["difference"].notna()]
    others = parts(apart, "line")
    drawing, axes = style.panels([2.3, 0.75 + 0.22 * len(others)] if others else [2.3])
    if others:
        # Arms that are compared with nothing train on other rows in a step: their losses are elsewhere for that reason.
        rows = rows[rows["line"].isin(others) | rows["arm"].isin(apart["against"])]
        _draw_distances(axes[1], others)
    has_bands = draw_curves(axes[0], rows)
    axes[0].set_title(rows["group"].iloc[0])
    # Where lines lie on one another a legend tells nothing apart: the lower panel names them.
    coincide = bool(others) and apart["difference"].max() < SEEN * np.ptp(rows["loss"])
    note = "Lines: means over runs."
    if has_bands:
        note += " Bands: from the lowest to the highest run."
    if rows["line"].nunique() > 1:
        note += " Lines alternate as dashes, because most coincide."
    if others:
        note += " Lower panel: the largest difference of any run at each step."
        note += " Arms that train on other sequences are in the table alone."
    looks = {arm: look(arm) for arm in rows["arm"].unique()}
    return style.finished(drawing, [] if coincide else style.keys(looks), note)


def draw_curves(ax: Axes, rows: pd.DataFrame) -> bool:
    """Draw a line for each arm, and say whether there is a band around one."""
    lines = parts(rows, "line")
    has_bands = False
    for place, mine in enumerate(lines.values()):
        # Each line begins its dashes where the one before ends them.
        dashes = (DASH * place, (DASH, DASH * (len(lines) - 1) or 0.01))
        tone = look(mine["arm"].iloc[0])["color"]
        values = mine.groupby("step", sort=False)["loss"].agg(["min", "mean", "max"])
        # Of one run, or of equal ones, a band would be an invisible shape in the file.
        if (values["min"] < values["max"]).any():
            has_bands = True
            ax.fill_between(values.index, values["min"], values["max"], color=tone, alpha=0.15, linewidth=0)
        ax.plot(values.index, values["mean"], color=tone, linestyle=dashes)
    ax.set(xlabel="optimizer step", ylabel="training loss (nats)")
    return has_bands


def _draw_distances(ax: Axes, rows_of: dict[str, pd.DataFrame]) -> None:
    """Draw a row for each arm, and in it a point for each step."""
    ax.set_xscale("symlog", linthresh=EXACT)  # a logarithmic axis that has a place for zero
    for place, mine in enumerate(rows_of.values()):
        arm, against = mine[["arm", "against"]].iloc[0]
        furthest = mine.groupby("step")["difference"].max()  # of all seeds
        ax.plot(furthest, [place] * len(furthest), **look(arm), linestyle="none", markersize=4, alpha=0.6)
    style.name_bars(ax, rows_of)
    few = SymmetricalLogLocator(base=10, linthresh=EXACT)
    few.set_params(numticks=6)
    ax.xaxis.set_major_locator(few)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set(xlabel=f"difference from {against}'s loss at each step (nats)", xlim=(-EXACT / 4, None))
