"""Bytes that a rank sends in a step: by collective, and inside and between nodes."""

import functools

import pandas as pd
from matplotlib.figure import Figure

from study.core.recipes import RECIPES
from study.core.text import rounded
from study.records import metrics
from study.records.groups import groups
from study.records.runs import Run, Runs
from study.report import style
from study.report.of_record import sent_bytes
from study.report.tables import lines_of, stacked

COUNTED, PAPER = "counted", "ZeRO paper"  # sources of bars
# By stage, in all-reduces of the gradients. A reduce-scatter and an all-gather send half of what an all-reduce sends.
# Stage 3 gathers the weights before both passes.
OF_PAPER = (
    {"all-reduce": 1.0},
    {"reduce-scatter": 0.5, "all-gather": 0.5},
    {"reduce-scatter": 0.5, "all-gather": 0.5},
    {"reduce-scatter": 0.5, "all-gather": 1.0},
)
BARS = style.StackedBars(
    "times",
    style.COLLECTIVES,
    functools.partial(rounded, form=".3g"),
    "bytes sent in a step (1 = one all-reduce of the gradients)",
)
LEAST = 1e-4  # of an all-reduce of the gradients: averaging a loss is too small for a bar


def table(runs: Runs) -> pd.DataFrame:
    """Return what a rank sends in a step, in all-reduces of the gradients: counted, and as published."""
    rows = []
    sending = [run for run in runs.done if metrics.sent(run.record) and _all_reduce_bytes(run)]
    for place, (run, *_), _ in lines_of(groups(sending)):  # repeats send the same
        times = {kind.replace("_", "-"): sent / _all_reduce_bytes(run) for kind, sent in sent_bytes(run).items()}
        sources = {COUNTED: {kind: number for kind, number in times.items() if number > LEAST}}
        if not run.record.observed.fsdp and run.record.requested.accumulation == 1:  # of which the paper tells
            sources[PAPER] = OF_PAPER[run.record.observed.stage or 0]
        rows += stacked(place, "times", sources)
    return pd.DataFrame(rows)


def _all_reduce_bytes(run: Run) -> float:
    """Return what a rank sends when the gradients are all-reduced in a ring; 0 if nothing is, or that is unknown."""
    seen = run.record.observed
    ranks = seen.ranks or 1
    gradients = seen.trained_parameters or seen.parameters or 0
    bytes_each = RECIPES.get(run.record.requested.precision or "", RECIPES["fp32"]).gradient_bytes
    return 2 * gradients * bytes_each * (ranks - 1) / ranks


def figure(rows: pd.DataFrame) -> Figure:
    """Bytes that a rank sends in a step, as a multiple of one all-reduce of the gradients, by collective."""
    note = "Bars: counted, in bytes as sent in rings, where an all-reduce sends the data twice."
    if (rows["kind"] != "real").any():
        note += " Hatched: on virtual ranks."
    return style.stacks(rows, BARS, note)
