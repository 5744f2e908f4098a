"""Bytes that a rank sends in a step: by collective, and inside and between nodes."""

import pandas as pd
from matplotlib.figure import Figure

from study.core import gpus
from study.predict.front import papers
from study.records import metrics
from study.records.groups import groups, lines
from study.records.runs import Run, Runs
from study.report import style
from study.report.grouping import columns, in_order

COUNTED, PAPER = "counted", "ZeRO paper"  # sources of bars


def table(runs: Runs) -> pd.DataFrame:
    """Return what a rank sends in a step, as a multiple of one all-reduce of the gradients: counted, and as published.

    Bytes count as in the ZeRO paper, for rings: an all-reduce sends the data twice, every other collective once.
    """
    rows = []
    known = groups([run for run in runs.done if metrics.sent(run.record) and _all_reduce_bytes(run)])
    for group, members in known.items():
        for line, repeats in lines(members).items():
            run = repeats[0]
            about = {
                "group": group,
                "panel": group,
                "line": line,
                "passes": run.record.requested.accumulation,
                "n": len(repeats),
            }
            about |= columns(run, "arm", "ranks", "kind")
            bars = {COUNTED: _counted(run), PAPER: _of_paper(run)}
            for source, times_of in bars.items():
                rows += [
                    about | {"source": source, "collective": kind, "times": sent} for kind, sent in times_of.items()
                ]
    return pd.DataFrame(rows)


def _counted(run: Run) -> dict[str, float]:
    """Return multiples of an all-reduce, without collectives too small for a bar, such as averaging a loss."""
    all_reduce = _all_reduce_bytes(run)
    moved = {kind.replace("_", "-"): sent / all_reduce for kind, sent in sent_bytes(run).items()}
    return {kind: times for kind, times in moved.items() if times > 1e-4}


def _all_reduce_bytes(run: Run) -> float:
    """Return what a rank sends when the gradients are all-reduced in a ring; 0 if nothing is, or that is unknown."""
    ranks = run.record.observed.ranks or 1
    bytes_each = 2 if run.record.requested.precision == "bf16_cast" else 4
    return 2 * (run.record.observed.parameters or 0) * bytes_each * (ranks - 1) / ranks


def _of_paper(run: Run) -> dict[str, float]:
    if run.record.observed.stage:
        return {"reduce-scatter": 0.5, "all-gather": 1.0 if run.record.observed.stage == 3 else 0.5}
    return {} if run.record.observed.fsdp else {"all-reduce": 1.0}


def sent_bytes(run: Run) -> dict[str, float]:
    """Return what the first rank sends in a step, by collective. Rings: an all-reduce sends the data twice."""
    sent = dict.fromkeys(metrics.sent(run.record), 0.0)
    for kind, count in run.record.traffic.per_rank[0].items() if sent else ():
        for ranks, size_bytes in count.by_ranks(run.record.observed.ranks or 1).items():
            sent[kind] += papers.wire_bytes({kind: size_bytes}, len(ranks))
    return sent


def by_arm(rows: pd.DataFrame, source: str) -> dict[str, float]:
    """Return the multiples of an all-reduce by arm, in the order of the arms."""
    times = rows[rows["source"] == source].groupby("arm")["times"].sum()
    return {arm: times[arm] for arm in style.ordered(times.index)}


@style.figure
def figure(rows: pd.DataFrame) -> Figure:
    """Bytes that a rank sends in a step, as a multiple of one all-reduce of the gradients, by collective."""
    note = (
        f"Bars: counted, {style.counted(rows)}; hatched: on virtual ranks. Bytes as sent in rings, where an all-reduce"
    )
    note += " sends the data twice."
    drawing = style.stacks(rows.assign(length=rows["times"]), "collective", style.COLLECTIVES, "{:.3g}".format, note)
    drawing.axes[-1].set_xlabel("bytes sent in a step (1 = one all-reduce of the gradients)", loc="right")
    return drawing


# --- inside and between nodes --------------------------------------------------------------------------------------


def between_nodes(runs: Runs, node_ranks: int = 2) -> pd.DataFrame:
    """Return bytes of a step inside nodes of `node_ranks` ranks and between them, and what a rank then holds.

    A node sends on rings that enter and leave each node once. `kernel`: bytes that the kernel saw written, divided by
    what gloo should write.
    """
    several = [
        run
        for run in runs.done
        if metrics.sent(run.record) and run.record.observed.ranks and run.record.observed.ranks > node_ranks
    ]
    several = [run for run in several if not (run.record.observed.ranks or 0) % node_ranks]
    rows = []
    for group, members in groups(several).items():
        rows += [{"group": group} | _between_nodes(run, node_ranks) for run in sorted(members, key=in_order)]
    return pd.DataFrame(rows)


def _between_nodes(run: Run, node_ranks: int) -> dict:
    per_kind = run.record.traffic.per_rank[0]
    moved: gpus.Groups = {kind: {**count.by_ranks(run.record.observed.ranks or 1)} for kind, count in per_kind.items()}
    split = gpus.by_node(moved, node_ranks)
    wire = metrics.wire_bytes_per_rank(run.record)[0]
    kernel = run.record.traffic.kernel_bytes_written[0]
    components = next((rank.at_peak for rank in run.record.memory.components.per_rank if rank.at_peak), {})
    peak_bytes = metrics.peak_bytes(run.record)
    return columns(run, "arm", "ranks", "kind") | {
        "inside_mb": sum(split["inside"].values()) / 1e6,
        "between_mb": sum(split["between"].values()) / 1e6,
        "a_node_sends_mb": gpus.sent_by_a_node(moved, node_ranks) / 1e6,
        "kernel": kernel / wire if wire and kernel else None,
        "weights_at_peak_mb": components.get("weights", 0) / 1e6 if components else None,
        "peak_mb": peak_bytes / 1e6 if peak_bytes else None,
    }
