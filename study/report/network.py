"""The table of the network protocol: seconds of a step against the bandwidth between emulated hosts, and predicted.

What a step takes over links without a limit is measured. What a limit adds is predicted, from the bytes that theory
says an arm sends and from two constants of a link. They are fitted on FITTED_ON alone; all other cells are held out.
"""

from statistics import median

from study.records.groups import by, groups
from study.records.prediction import setup_of
from study.records.runs import Run, Runs
from study.report.tables import middle, seconds, timed
from study.theory import links, nodes
from study.theory.links import SlowLink

FITTED_ON = {"ranks": 2, "accumulation": 1, "bandwidth_mbit": 200.0}
AXES = ("hosts", "bandwidth_mbit", "accumulation")


def network(runs: Runs) -> list[dict]:
    """A row for each arm, ranks, hosts, passes and bandwidth. Rows without a limit have nothing predicted."""
    rows = []
    for group, members in groups([run for run in timed(runs) if run.hosts], without=AXES).items():
        cells: dict[tuple, list[Run]] = {}
        for run in members:
            cells.setdefault((run.arm, run.ranks, run.hosts, run.accumulation, mbit(run)), []).append(run)
        of_group = [_row(group, repeats, cells) for repeats in cells.values()]
        link = fitted(of_group)
        rows += [row | _prediction(row, link) for row in of_group]
    return sorted(rows, key=lambda row: (row["group"], row["ranks"], row["hosts"], row["passes"], row["Mbit/s"] or 1e9))


def curves(rows: list[dict]) -> list[dict]:
    """The rows of groups that were run at several bandwidths."""
    several = {name for (name,), mine in by(rows, "group").items() if len({row["Mbit/s"] for row in mine}) > 1}
    return [row for row in rows if row["group"] in several]


def mbit(run: Run) -> float | None:
    """The bandwidth that the kernel was seen to keep to; None without a limit."""
    return run.record.observed.network.bandwidth_mbit


def _row(group: str, repeats: list[Run], cells: dict[tuple, list[Run]]) -> dict:
    run = repeats[0]
    place = (run.arm, run.ranks, run.hosts, run.accumulation)
    free, moved = seconds(cells.get((*place, None), [])), run.record.traffic
    of_repeats = [each.record.traffic for each in repeats]
    sent = [link.sent_bytes / traffic.link_steps for traffic in of_repeats for link in traffic.per_link]
    counted = [size for size in moved.gloo_wire_bytes if size is not None]
    calls = {kind: collective.calls for kind, collective in moved.per_rank[0].items()} if moved.per_rank else {}
    return {
        "group": group,
        "arm": run.arm,
        "kind": run.kind,
        "ranks": run.ranks,
        "hosts": run.hosts,
        "passes": run.accumulation,
        "Mbit/s": mbit(run),
        **middle(seconds(repeats)),
        "predicted bytes": _wire_bytes(run),
        "counted bytes": median(counted) if counted else None,
        "link bytes": median(sent) if sent else None,
        "calls": sum(calls.values()) - calls.get("barrier", 0) if calls else None,
        "unlimited s": median(free) if free else None,
    }


def _wire_bytes(run: Run) -> float | None:
    """What theory says that a host's link carries in a step. Not known where gloo reduces to one rank."""
    setup = setup_of(run.record)
    moved = setup and nodes.predicted(setup, run.ranks // run.hosts)
    if not moved or "reduce" in moved:
        return None
    return nodes.sent_by_a_node(moved, run.ranks // run.hosts, nodes.GLOO)


def is_fitted_on(row: dict) -> bool:
    place = {"ranks": row["ranks"], "accumulation": row["passes"], "bandwidth_mbit": row["Mbit/s"]}
    return place == FITTED_ON


def fitted(rows: list[dict]) -> SlowLink | None:
    """The link's constants; None where there is nothing to fit them on."""
    cells = [
        (row["predicted bytes"], row["calls"], row["Mbit/s"], row["median"] - row["unlimited s"])
        for row in rows
        if is_fitted_on(row) and _is_known(row) and row["median"] > row["unlimited s"]
    ]
    return links.fit(cells) if len(cells) > 1 else None


def _is_known(row: dict) -> bool:
    return None not in (row["Mbit/s"], row["unlimited s"], row["predicted bytes"], row["calls"])


def _prediction(row: dict, link: SlowLink | None) -> dict:
    if link is None or not _is_known(row):
        return {"predicted s": None, "error": None, "held out": None}
    predicted_s = row["unlimited s"] + link.added_s(row["predicted bytes"], row["calls"], row["Mbit/s"])
    return {"predicted s": predicted_s, "error": predicted_s / row["median"] - 1, "held out": not is_fitted_on(row)}
