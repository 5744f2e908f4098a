"""What fits: how far each arm goes under a memory cap, and which arms of a protocol fit this machine by formulas."""

import contextlib

import pandas as pd
import psutil

from study.core.errors import Stop
from study.core.gpus import gpus_here
from study.core.numbers import size
from study.core.shapes import shape_of
from study.predict.front import (
    FRAGMENTATION,
    HOST_PROCESS_BYTES,
    OUTSIDE_AT_MOST_BYTES,
    VIRTUAL_PROCESS_BYTES,
    Estimate,
    Setup,
    estimate,
    named,
)
from study.records.groups import groups, lines
from study.records.runs import Run, Runs
from study.report.grouping import SETTINGS, columns
from study.report.topics import memory
from study.sweeps import protocol
from study.sweeps.protocol import Cell

SEQUENCE = 128  # tokens, as in document 002, if a cell does not say


def table(runs: Runs) -> pd.DataFrame:
    """Return for each arm under a memory cap the largest model or batch that ran, and the smallest that did not.

    Offloading without a GPU is left out: the emulated device then holds what is offloaded as well.
    """
    rows = []
    ended = [run for run in runs if run.requested.memory_cap_gib and run.status in ("done", "oom", "host_oom")]
    capped = [run for run in ended if not memory.has_one_memory(run)]
    for what in ("model", "micro_batch"):
        alike = [name for name in ("memory_cap_gib", *SETTINGS) if name not in (what, "attention")]
        for group, members in groups(capped, only=alike).items():
            sizes = _sizes(members, what)
            tried = [run for run in members if run.value(what) in sizes]
            for line, mine in lines(tried).items() if len(sizes) > 1 else ():
                done = {run.value(what) for run in mine if run.done}
                failed = {run.value(what) for run in mine} - done
                place = {"group": group, "line": line, "what": what} | columns(mine[0], "memory_cap_gib")
                ends = {
                    "largest": max(done, key=sizes.get, default=None),
                    "failed": min(failed, key=sizes.get, default=None),
                }
                rows.append(place | ends | {"n": len(mine)})
    return pd.DataFrame(rows)


def _sizes(members: list[Run], what: str) -> dict:
    """Return the values that were tried with what orders them: rows per pass by their number, models by parameters."""
    if what == "micro_batch":
        return {run.micro_batch: run.micro_batch for run in members}
    observed = {run.model: run.parameters for run in members if run.model and run.parameters}
    for model in {run.model for run in members if run.model} - observed.keys():
        with contextlib.suppress(Stop):  # no built-in shape has this name
            observed[model] = named(shape_of(model)).parameters
    return observed


# --- before anything is launched -----------------------------------------------------------------------------------


def fitting(name: str, scale: str, precision: str) -> pd.DataFrame:
    """Return what a rank of each arm of a protocol needs of GPU and host memory, and whether both have it."""
    gpus = gpus_here()
    host_bytes = psutil.virtual_memory().total
    rows = []
    for cell in protocol.cells(protocol.read(name), scale):
        if cell.value("precision") == precision:
            needed = needed_by(cell, "cuda" if gpus else "cpu")
            rows.append({"arm": cell.arm} | room(needed, gpus[0].memory_bytes if gpus else None, host_bytes))
    return pd.DataFrame(rows)


def room(needed: Estimate, gpu_bytes: int | None, host_bytes: int) -> dict:
    """Return needed and available memory. Without a GPU, the host holds everything."""
    if gpu_bytes is None:
        on_host = needed.peak_bytes + VIRTUAL_PROCESS_BYTES
        row = {"gpu_memory": "there is no GPU", "host_memory": f"{size(on_host)} of {size(host_bytes)}"}
        return row | {"fits": on_host <= host_bytes}
    on_host = needed.host_bytes + HOST_PROCESS_BYTES
    free = gpu_bytes - OUTSIDE_AT_MOST_BYTES - FRAGMENTATION * gpu_bytes
    row = {"gpu_memory": f"{size(needed.peak_bytes)} of {size(free)}"}
    row |= {"host_memory": f"{size(on_host)} of {size(host_bytes)}"}
    return row | {"fits": needed.peak_bytes <= free and on_host <= host_bytes}


def needed_by(cell: Cell, device: str) -> Estimate:
    """Return the estimate of a cell that has not run."""
    shape = named(shape_of(str(cell.value("model"))))
    options = {name: cell.value(name) for name in ("precision", "micro_batch")}
    sequence = cell.value("sequence") or SEQUENCE
    return estimate(Setup.of_arm(shape, cell.arm, ranks=cell.ranks or 1, sequence=sequence, device=device, **options))
