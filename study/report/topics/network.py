"""The table of the network protocol: seconds of a step against the bandwidth between emulated hosts, and predicted.

What a step takes over links without a limit is measured. What a limit adds is predicted, from the bytes that theory
says an arm sends and from two constants of a link. They are fitted on FITTED_ON alone, for each number of ranks; all
other cells are held out.
"""

from statistics import median

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from study.bench.prediction import setup_of
from study.predictor import links, nodes
from study.predictor.links import SlowLink
from study.records import metrics, stats
from study.records.groups import by, groups
from study.records.runs import Run, Runs
from study.report import seconds, style
from study.report.style import INK, OPEN, colour, ordered
from study.spec import node_traffic

FITTED_ON = {"hosts": 2, "passes": 1, "Mbit/s": 200.0}
AXES = ("hosts", "bandwidth_mbit", "accumulation")
PREDICTED = {"linewidth": 1, "linestyle": ":", "marker": "_", "markersize": 12}  # a lone prediction has no line
REDUCED = ("all_reduce", "reduce_scatter")


def table(runs: Runs) -> list[dict]:
    """A row for each arm, ranks, hosts, passes and bandwidth. Rows without a limit have nothing predicted."""
    rows = []
    for group, members in groups([run for run in seconds.timed(runs) if run.hosts], without=AXES).items():
        cells: dict[tuple, list[Run]] = {}
        for run in members:
            cells.setdefault((run.arm, run.ranks, run.hosts, run.accumulation, mbit(run)), []).append(run)
        of_group = [_row(group, repeats, cells) for repeats in cells.values()]
        link = {ranks: fitted(mine) for (ranks,), mine in by(of_group, "ranks").items()}
        rows += [row | _prediction(row, link[row["ranks"]]) for row in of_group]
    return sorted(rows, key=lambda row: (row["group"], row["ranks"], row["hosts"], row["passes"], row["Mbit/s"] or 1e9))


def curves(rows: list[dict]) -> list[dict]:
    """The rows of groups that were run at several bandwidths."""
    several = {name for (name,), mine in by(rows, "group").items() if len({row["Mbit/s"] for row in mine}) > 1}
    return [row for row in rows if row["group"] in several]


def mbit(run: Run) -> float | None:
    """The bandwidth that the kernel kept to; None without a limit."""
    return run.record.observed.network.bandwidth_mbit


def _row(group: str, repeats: list[Run], cells: dict[tuple, list[Run]]) -> dict:
    run = repeats[0]
    place = (run.arm, run.ranks, run.hosts, run.accumulation)
    free = seconds.of(cells.get((*place, None), []))
    of_repeats = [each.record.traffic for each in repeats]
    sent = [link.sent_bytes / traffic.link_steps for traffic in of_repeats for link in traffic.per_link]
    counted = [size for size in metrics.wire_bytes_per_rank(run.record) if size is not None]
    carried = _link_bytes(run) or {}
    return {
        "group": group,
        "arm": run.arm,
        "kind": run.kind,
        "ranks": run.ranks,
        "hosts": run.hosts,
        "passes": run.accumulation,
        "Mbit/s": mbit(run),
        **seconds.middle(seconds.of(repeats)),
        "predicted bytes": sum(carried.values()) if carried else None,
        "of them gathered": carried.get("gathered"),
        "counted bytes": median(counted) if counted else None,
        "link bytes": median(sent) if sent else None,
        "unlimited s": median(free) if free else None,
    }


def _link_bytes(run: Run) -> dict[str, float] | None:
    """Bytes that a link carries in a step by theory, reduced and gathered ones. None if gloo reduces to one rank."""
    setup, node_ranks = setup_of(run.record), run.ranks // run.hosts
    moved = setup and nodes.predicted(setup, node_ranks)
    if not moved or "reduce" in moved:
        return None
    sent = {
        kind: node_traffic.sent_by_a_node({kind: groups}, node_ranks, node_traffic.GLOO)
        for kind, groups in moved.items()
    }
    reduced = sum(size for kind, size in sent.items() if kind in REDUCED)
    return {"reduced": reduced, "gathered": sum(sent.values()) - reduced}


def is_fitted_on(row: dict) -> bool:
    return all(row[name] == value for name, value in FITTED_ON.items())


def fitted(rows: list[dict]) -> SlowLink | None:
    """The constants of a link, from rows with the same number of ranks; None if there is nothing to fit them on."""
    cells = [
        (*_carried(row), row["Mbit/s"], row["median"] - row["unlimited s"])
        for row in rows
        if is_fitted_on(row) and _is_known(row) and row["median"] > row["unlimited s"]
    ]
    return links.fit(cells) if len(cells) > 1 else None


def _is_known(row: dict) -> bool:
    return None not in (row["Mbit/s"], row["unlimited s"], row["predicted bytes"])


def _carried(row: dict) -> tuple[float, float]:
    return row["predicted bytes"] - row["of them gathered"], row["of them gathered"]


def _prediction(row: dict, link: SlowLink | None) -> dict:
    if link is None or not _is_known(row):
        return {"predicted s": None, "error": None, "held out": None}
    predicted_s = row["unlimited s"] + link.added_s(*_carried(row), row["Mbit/s"])
    return {"predicted s": predicted_s, "error": predicted_s / row["median"] - 1, "held out": not is_fitted_on(row)}


def sentence(rows: list[dict]) -> str:
    """From `network.table`: how well a slow link is predicted, and what it costs the arms."""
    limited = [row for row in rows if row["error"] is not None]
    if not limited:
        return ""
    held_out = [abs(row["error"]) for row in limited if row["held out"]]
    items, text = [], ""
    if held_out:
        errors = f"median error of the prediction is {stats.median(held_out):.1%}, and the largest {max(held_out):.0%}"
        text = f"**Over {len(held_out)} held-out cells, the {errors}.**"
    for (ranks, passes, mbit), mine in by(limited, "ranks", "passes", "Mbit/s").items():
        of_arm = {row["arm"]: row["median"] for row in mine if row["hosts"] == max(row["hosts"] for row in mine)}
        if "ddp" in of_arm:
            others = [f"{arm} {of_arm[arm] / of_arm['ddp']:.2f}" for arm in ordered(of_arm) if arm != "ddp"]
            count = "1 pass" if passes == 1 else f"{passes} passes"
            items.append(f"- {ranks} ranks, {count}, {mbit:g} Mbit/s: {', '.join(others)} times DDP's seconds")
    return "\n".join([text, "", *items])


def title(rows: list[dict]) -> str:
    slowest = min((row["Mbit/s"] for row in rows if row["Mbit/s"]), default=None)
    step_s = {row["arm"]: row["median"] for row in rows if row["Mbit/s"] == slowest}
    if slowest is None or len(step_s) < 2:
        return "Seconds of a step"
    fast, slow = min(step_s, key=step_s.get), max(step_s, key=step_s.get)
    return f"At {slowest:g} Mbit/s, {slow} takes {step_s[slow] / step_s[fast]:.2g} times as long as {fast}"


@style.figure
def figure(rows: list[dict]) -> Figure:
    """Seconds of a step against the bandwidth of the links between emulated hosts: measured and predicted."""
    kinds = by(rows, "ranks", "hosts", "passes")
    drawing, axes = style.panels([2.0] * len(kinds), sharex=True)
    most = max(filter(None, (row["Mbit/s"] for row in rows)), default=1.0)
    free, places = 5 * most, sorted({row["Mbit/s"] for row in rows} - {None})
    for ax, ((ranks, hosts, passes), mine) in zip(axes, kinds.items(), strict=True):
        for (arm,), points in by(mine, "arm").items():
            known = [row for row in points if row["predicted s"] is not None]
            line = PREDICTED | {"color": colour(arm)}
            ax.plot([row["Mbit/s"] for row in known], [row["predicted s"] for row in known], **line)
            for row in points:
                style.point(ax, row["Mbit/s"] or free, row)
        ax.set(xscale="log", yscale="log", ylabel="seconds of a step")
        ax.margins(y=0.15)
        style.plain(ax.yaxis)
        place = f"{ranks} ranks on {hosts} hosts, {passes} {'pass' if passes == 1 else 'passes'} in a step"
        style.headed(ax, title(mine), place)
    axes[-1].set_xticks([*places, free], [*(f"{place:g}" for place in places), "no limit"])
    axes[-1].xaxis.set_minor_formatter(NullFormatter())
    axes[-1].set_xlabel("declared bandwidth of each host's link (Mbit/s)")
    marks = {"predicted": PREDICTED | {"color": INK}, "measured": OPEN}
    text = f"{seconds.note(rows)} Hosts and links are emulated on one machine; ranks, sockets and bytes are real."
    return style.finished(drawing, style.keys(rows, marks), text)
