"""Bytes that a rank sends in a step: by collective, and inside and between nodes."""

import pandas as pd
from matplotlib.figure import Figure

from study.predict.front import papers
from study.records import metrics
from study.records.groups import groups, lines
from study.records.runs import Run, Runs
from study.report import style
from study.report.tables import columns

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
            about = {"group": group, "panel": group, "line": line, "n": len(repeats)}
            about |= columns(run, "arm", "ranks", "kind")
            for kind, sent in sent_bytes(run).items():
                times = sent / _all_reduce_bytes(run)
                if times > 1e-4:  # averaging a loss is too small for a bar
                    rows.append(about | {"source": COUNTED, "collective": kind.replace("_", "-"), "times": times})
            rows += [about | {"source": PAPER, "collective": kind, "times": times} for kind, times in _of_paper(run)]
    return pd.DataFrame(rows)


def _all_reduce_bytes(run: Run) -> float:
    """Return what a rank sends when the gradients are all-reduced in a ring; 0 if nothing is, or that is unknown."""
    ranks = run.record.observed.ranks or 1
    bytes_each = {"bf16_cast": 2}.get(run.record.requested.precision or "", 4)
    return 2 * (run.record.observed.parameters or 0) * bytes_each * (ranks - 1) / ranks


def _of_paper(run: Run) -> list[tuple[str, float]]:
    if run.record.observed.fsdp:
        return []
    # A reduce-scatter and an all-gather send half of what an all-reduce sends. Stage 3 gathers before both passes.
    half = ("reduce-scatter", 0.5)
    by_stage = {1: [half, ("all-gather", 0.5)], 2: [half, ("all-gather", 0.5)], 3: [half, ("all-gather", 1.0)]}
    return by_stage.get(run.record.observed.stage or 0, [("all-reduce", 1.0)])


def sent_bytes(run: Run) -> dict[str, float]:
    """Return what the first rank sends in a step, by collective. Rings: an all-reduce sends the data twice."""
    sent = dict.fromkeys(metrics.sent(run.record), 0.0)
    for kind, count in run.record.traffic.per_rank[0].items() if sent else ():
        for ranks, size_bytes in count.by_ranks(run.record.observed.ranks or 1).items():
            sent[kind] += papers.wire_bytes({kind: size_bytes}, len(ranks))
    return sent


@style.figure
def figure(rows: pd.DataFrame) -> Figure:
    """Bytes that a rank sends in a step, as a multiple of one all-reduce of the gradients, by collective."""
    note = "Bars: counted; hatched: on virtual ranks. Bytes as sent in rings, where an all-reduce sends the data twice."
    drawing = style.stacks(rows.assign(length=rows["times"]), "collective", style.COLLECTIVES, "{:.3g}".format, note)
    drawing.axes[-1].set_xlabel("bytes sent in a step (1 = one all-reduce of the gradients)", loc="right")
    return drawing
