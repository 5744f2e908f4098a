"""The table of the network protocol: seconds of a step against the bandwidth between emulated hosts, and predicted.

What a step takes over links without a limit is measured. What a limit adds is predicted, from the bytes that theory
says an arm sends and from two constants of a link. They are fitted on FITTED_ON alone, for each number of ranks; all
other cells are held out.

A ring passes each link once in each direction, wherever its ranks are, so a link carries what one rank sends. Nothing
overlaps: models as small as those of this machine's runs send their gradients as one bucket, after the backward pass.

Reduced bytes and gathered bytes have a constant each. For two ranks, reducing takes the time of the data. Gathering
took two ranks 1.57 times as long, with any arm, but not four ranks; the reason is unknown. It is not a wait in each
collective: stage 3 makes 43 calls a step, stage 2 makes 3, and both take equally long.
"""

from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from study.bench.prediction import setup_of
from study.predictor import nodes
from study.records import metrics
from study.records.groups import by, groups
from study.records.runs import Run, Runs
from study.report import style
from study.report.grouping import each, parts
from study.report.style import INK, OPEN, colour, ordered
from study.report.topics.speed import middle, note, seconds, timed
from study.spec import node_traffic

FITTED_ON = {"hosts": 2, "passes": 1, "mbit": 200.0}
AXES = ("hosts", "bandwidth_mbit", "accumulation")
PREDICTED: dict = {"linewidth": 1, "linestyle": ":", "marker": "_", "markersize": 12}  # a lone prediction has no line
REDUCED = ("all_reduce", "reduce_scatter")
PLACE = ("group", "ranks", "hosts", "passes", "mbit")
BITS_PER_MEGABIT = 8e-6  # megabits of a byte


class SlowLink(NamedTuple):
    """Fitted constants of a link: how many times longer bytes take than the data alone at the declared bandwidth."""

    reduced: float
    gathered: float

    def added_s(self, reduced_bytes: float, gathered_bytes: float, mbit: float) -> float:
        return self.reduced * data_s(reduced_bytes, mbit) + self.gathered * data_s(gathered_bytes, mbit)


def data_s(wire_bytes: float, mbit: float) -> float:
    """Seconds of the data alone at the declared bandwidth."""
    return wire_bytes * BITS_PER_MEGABIT / mbit


def fit(cells: Iterable[tuple[float, float, float, float]]) -> SlowLink | None:
    """Least squares of relative errors, over cells of (bytes reduced, bytes gathered, Mbit/s, seconds added).

    None if the cells do not determine both constants.
    """
    seconds_of = np.array([(data_s(reduced, mbit), data_s(gathered, mbit), s) for reduced, gathered, mbit, s in cells])
    shares = seconds_of[:, :2] / seconds_of[:, 2:]
    constants, _, rank, _ = np.linalg.lstsq(shares, np.ones(len(shares)), rcond=None)
    return SlowLink(*map(float, constants)) if rank == 2 else None


def table(runs: Runs) -> pd.DataFrame:
    """Return a row for each arm, ranks, hosts, passes and bandwidth. Rows without a limit have nothing predicted."""
    rows = []
    for group, members in groups([run for run in timed(runs) if run.hosts], without=AXES).items():
        cells: dict[tuple, list[Run]] = {}
        for run in members:
            cells.setdefault((run.arm, run.ranks, run.hosts, run.accumulation, mbit(run)), []).append(run)
        of_group = [_row(group, repeats, cells) for repeats in cells.values()]
        for of_ranks in by(of_group, "ranks").values():
            _predict(of_ranks)
        rows += of_group
    if not rows:
        return pd.DataFrame()
    return pd.DataFrame(rows).sort_values(list(PLACE), kind="stable", na_position="last", ignore_index=True)


def curves(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of groups that were run at several bandwidths."""
    if rows.empty:
        return rows
    return rows[rows.groupby("group")["mbit"].transform(lambda column: column.nunique(dropna=False)) > 1]


def mbit(run: Run) -> float | None:
    """Return the bandwidth that the kernel kept to; None without a limit."""
    network = run.record.observed.network
    return network.bandwidth_mbit if network else None


def _row(group: str, repeats: list[Run], cells: dict[tuple, list[Run]]) -> dict:
    run = repeats[0]
    free = seconds(cells.get((run.arm, run.ranks, run.hosts, run.accumulation, None), []))
    of_repeats = [each.record.traffic for each in repeats]
    sent = [link.sent_bytes / (traffic.link_steps or 1) for traffic in of_repeats for link in traffic.per_link]
    counted = [size for size in metrics.wire_bytes_per_rank(run.record) if size is not None]
    carried = _link_bytes(run)
    return {
        "group": group,
        "arm": run.arm,
        "kind": run.kind,
        "ranks": run.ranks,
        "hosts": run.hosts,
        "passes": run.accumulation,
        "mbit": mbit(run),
        **middle(seconds(repeats)),
        "predicted_bytes": sum(carried.values()) if carried else None,
        "gathered_bytes": carried["gathered"] if carried else None,
        "counted_bytes": median(counted) if counted else None,
        "link_bytes": median(sent) if sent else None,
        "unlimited_s": median(free) if free else None,
        "predicted_s": None,
        "error": None,
        "held_out": None,
    }


def _link_bytes(run: Run) -> dict[str, float]:
    """Return bytes that a link carries in a step by theory; none if that is unknown, or gloo reduces to one rank."""
    setup = setup_of(run.record)
    node_ranks = (run.ranks or 1) // (run.hosts or 1)
    moved = nodes.predicted(setup, node_ranks) if setup else {}
    if not moved or "reduce" in moved:
        return {}
    sent = {
        kind: node_traffic.sent_by_a_node({kind: groups}, node_ranks, node_traffic.GLOO)
        for kind, groups in moved.items()
    }
    reduced = sum(size for kind, size in sent.items() if kind in REDUCED)
    return {"reduced": reduced, "gathered": sum(sent.values()) - reduced}


def _predict(rows: list[dict]) -> None:
    """Predict the seconds of rows with the same ranks. Without cells to fit the link on, they stay unknown."""
    known = [row for row in rows if None not in (row["mbit"], row["unlimited_s"], row["predicted_bytes"])]
    of_fit = [row for row in known if all(row[name] == value for name, value in FITTED_ON.items())]
    slower = [(*_load(row), row["median"] - row["unlimited_s"]) for row in of_fit if row["median"] > row["unlimited_s"]]
    link = fit(slower) if len(slower) > 1 else None
    if link is None:
        return
    for row in known:
        row["held_out"] = row not in of_fit
        row["predicted_s"] = row["unlimited_s"] + link.added_s(*_load(row))
        row["error"] = row["predicted_s"] / row["median"] - 1


def _load(row: dict) -> tuple[float, float, float]:
    """Return the bytes that are reduced, those that are gathered, and the bandwidth."""
    return row["predicted_bytes"] - row["gathered_bytes"], row["gathered_bytes"], row["mbit"]


def sentence(rows: pd.DataFrame) -> str:
    """Return how well a slow link is predicted, and what it costs the arms on the most hosts."""
    limited = rows[rows["error"].notna()] if len(rows) else rows
    if limited.empty:
        return ""
    errors = limited[limited["held_out"].astype(bool)]["error"].abs()
    words = f"median error of the prediction is {errors.median():.1%}, and the largest {errors.max():.0%}"
    lines = [f"**Over {len(errors)} held-out cells, the {words}.**" if len(errors) else "", ""]
    for (ranks, passes, mbit), mine in limited.groupby(["ranks", "passes", "mbit"], sort=False):
        of_arm = mine[mine["hosts"] == mine["hosts"].max()].set_index("arm")["median"].to_dict()
        if "ddp" in of_arm:
            others = [f"{arm} {of_arm[arm] / of_arm['ddp']:.2f}" for arm in ordered(of_arm) if arm != "ddp"]
            lines.append(f"- {ranks} ranks, passes: {passes}, {mbit:g} Mbit/s: {', '.join(others)} times DDP's seconds")
    return "\n".join(lines)


@style.figure
def figure(rows: pd.DataFrame) -> Figure:
    """Seconds of a step against the bandwidth of the links between emulated hosts: measured and predicted."""
    kinds = parts(rows, "ranks", "hosts", "passes")
    drawing, axes = style.panels([2.0] * len(kinds), sharex=True)
    places = sorted(rows["mbit"].dropna().unique())
    free = 5 * max(places, default=1.0)
    for ax, mine in zip(axes, kinds.values(), strict=True):
        _draw(ax, mine, free)
    axes[-1].set_xticks([*places, free], [*(f"{place:g}" for place in places), "no limit"])
    axes[-1].xaxis.set_minor_formatter(NullFormatter())
    axes[-1].set_xlabel("declared bandwidth of each host's link (Mbit/s)")
    marks = {"predicted": PREDICTED | {"color": INK}, "measured": OPEN}
    text = f"{note(rows)} Hosts and links are emulated on one machine; ranks, sockets and bytes are real."
    return style.finished(drawing, style.keys(rows["arm"], marks), text)


def _draw(ax: Axes, mine: pd.DataFrame, free: float) -> None:
    for arm, points in parts(mine, "arm").items():
        known = points[points["predicted_s"].notna()]
        ax.plot(known["mbit"], known["predicted_s"], **PREDICTED, color=colour(arm))
        for row in each(points.fillna({"mbit": free})):
            style.point(ax, row.mbit, row)
    ax.set(xscale="log", yscale="log", ylabel="seconds of a step")
    ax.margins(y=0.15)
    style.plain(ax.yaxis)
    first = mine.iloc[0]
    style.headed(ax, f"{first['ranks']} ranks on {first['hosts']} hosts, passes {first['passes']}")
