"""Memory: what a rank holds at its peak, part by part."""

from collections import defaultdict
from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from study.core.text import size
from study.records import metrics
from study.records.compare import has_one_memory
from study.records.groups import groups
from study.records.runs import Run, Runs
from study.report import style
from study.report.of_record import predicted
from study.report.tables import SETTINGS, lines_of, stacked

PARTS = style.COLOURS["roles"]
PART_OF = {role: part for part, roles in PARTS.items() for role in roles}
BARS = style.StackedBars("bytes", style.PARTS, size, "peak memory of a rank")
ONE_MEMORY = "no GPU: one memory"


def table(runs: Runs) -> pd.DataFrame:
    """Return what a rank holds at its peak, by part: measured and predicted."""
    rows = []
    known = [run for run in runs.done if metrics.components(run.record)]
    for place, repeats, _ in lines_of(groups(known, only=SETTINGS)):
        run = max(repeats, key=held_bytes)  # a peak that was seen once has to fit
        if has_one_memory(run):
            place["panel"] += f", {ONE_MEMORY}"
        sources = {"measured": part_bytes(metrics.components(run.record))}
        if estimate := predicted(run.record):
            sources["predicted"] = part_bytes(estimate.at_peak)
        rows += stacked(place, "bytes", sources)
    return pd.DataFrame(rows)


def held_bytes(run: Run) -> int:
    return sum(metrics.components(run.record).values())


def part_bytes(components: Mapping[str, float]) -> dict[str, float]:
    """Return components summed up into the few parts that a figure shows."""
    sizes: dict[str, float] = defaultdict(int)
    for role, size_bytes in components.items():
        sizes[PART_OF.get(role, "other")] += size_bytes  # older records have roles that have no part of their own
    return {part: sizes[part] for part in PARTS if part in sizes}


def figure(rows: pd.DataFrame) -> Figure:
    """Peak memory of a rank, by what its tensors are for; marks are sums that were predicted or printed."""
    note = "Bars: the run with the highest peak."
    if (rows["kind"] != "real").any():
        note += " Hatched: virtual ranks or an emulated smaller device."
    if rows["panel"].str.endswith(ONE_MEMORY).any():
        note += " Without a GPU, host and device are one memory, so arms that offload have a panel of their own."
    return style.stacks(rows, BARS, note)
