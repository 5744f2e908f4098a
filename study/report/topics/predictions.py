"""Predictions beside what others measured and published, and beside what our own runs on a GPU measured."""

from collections.abc import Iterator
from contextlib import suppress

import pandas as pd
from matplotlib.figure import Figure

from study.core.errors import Stop
from study.core.gpus import gpu_named
from study.predict.front import Machine, Setup, memory_kinds, published, scores, step_time
from study.records import metrics
from study.records.runs import Run, Runs
from study.report import style
from study.report.grouping import columns, parts
from study.report.of_record import setup_of
from study.report.style import INK, SHADE

SCALES = {"memory": (1e9, "GB"), "time": (1, "s per step")}
FIELDS = {"allocated": "peak_allocated_bytes", "reserved": "peak_reserved_bytes", "driver": "device_used_bytes"}


def table() -> pd.DataFrame:
    """Return every published number that has a prediction."""
    names = {"set", "source", "quantity", "measured", "ours"}
    rows = pd.DataFrame(each.model_dump(include=names) for each in scores.numbers()).dropna(subset="ours")
    number = rows["set"].map(published.set_number)
    return rows.assign(error=rows["ours"] / rows["measured"] - 1, unseen=number == number.max())


@style.figure
def figure(rows: pd.DataFrame) -> Figure:
    """Predictions against what others measured and published: peak memory, and seconds of a step."""
    drawing, axes = style.panels([3.0] * rows["quantity"].nunique())
    for ax, (quantity, mine) in zip(axes, parts(rows, "quantity").items(), strict=True):
        scale, unit = SCALES[quantity]
        for unseen, points in mine.groupby("unseen"):
            tone = style.ORANGE if unseen else style.BLUE
            ax.plot(points["measured"] / scale, points["ours"] / scale, "o", color=tone, markersize=3, fillstyle="none")
        ends = [mine["measured"].min() / scale, mine["measured"].max() / scale]
        ax.plot(ends, ends, color=INK, linewidth=0.8)
        ax.fill_between(ends, [0.7 * end for end in ends], [1.3 * end for end in ends], color=SHADE, alpha=0.5)
        ax.set(xscale="log", yscale="log", xlabel=f"measured by others ({unit})", ylabel=f"predicted ({unit})")
        for axis in (ax.xaxis, ax.yaxis):  # plain numbers
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
        ax.set_title(f"{quantity}: {len(mine)} published numbers, median error {mine['error'].abs().median():.1%}")
    note = "Line: exact. Band: up to 30 % off. Orange: the newest set, which no constant was fitted to. None of these"
    return style.finished(drawing, [], f"{note} runs was made here.")


def on_gpu(runs: Runs) -> pd.DataFrame:
    """Return our own runs on a GPU: what each measured, what was predicted, and predicted over measured."""
    rows = []
    for run in runs.done:
        setup = setup_of(run.record) if run.record.observed.device == "cuda" else None
        for quantity, measured, predicted in _of_run(run, setup) if setup else ():
            about = columns(run, "model", "arm", "ranks", "kind") | {"quantity": quantity}
            about |= {"measured": measured, "predicted": predicted}
            rows.append(about | {"predicted over measured": predicted / measured})
    return pd.DataFrame(rows)


def _of_run(run: Run, setup: Setup) -> Iterator[tuple[str, float, float]]:
    """Give what a run measured and has a prediction of. A virtual rank has no NCCL, and sends nothing."""
    gpu = None
    with suppress(Stop, IndexError):
        gpu = gpu_named(run.record.hardware.devices[0].name)
    kinds = memory_kinds(setup, gpu)
    for kind, field in FIELDS.items():
        measured = max((getattr(rank, field) or 0 for rank in run.record.memory.per_rank), default=0)
        predicted = getattr(kinds, kind)
        if measured and predicted and not (kind == "driver" and run.record.is_virtual):
            yield kind, measured, predicted
    if (
        gpu
        and metrics.value(run.record, "step_s")
        and not run.record.is_virtual
        and run.record.observed.offload_optimizer != "nvme"
    ):
        of_a_node = max((len(machine.ranks) for machine in run.record.machines), default=run.record.observed.ranks or 1)
        yield (
            "step",
            metrics.value(run.record, "step_s"),
            step_time(setup, Machine(gpu=gpu, gpus_per_node=of_a_node)).seconds,
        )
