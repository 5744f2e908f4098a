"""Which arms of a protocol fit this machine, by formulas, before anything is launched."""

import psutil

from study.io.numbers import size
from study.machine.gpus import gpus_here
from study.predictor.architecture import named
from study.predictor.estimate import Estimate, estimate
from study.predictor.memory.memory_kinds import FRAGMENTATION, OUTSIDE_AT_MOST_BYTES
from study.predictor.room import HOST_PROCESS_BYTES, PROCESS_BYTES
from study.predictor.setup import Setup
from study.spec.shapes import shape_of
from study.sweeps import protocol
from study.sweeps.protocol import Cell

SEQUENCE = 128  # tokens, as in document 002, if a cell does not say


def table(name: str, scale: str, precision: str) -> list[dict]:
    """A row for each arm of a protocol: what a rank needs of GPU and host memory, and whether both have it."""
    gpus, host_bytes = gpus_here(), psutil.virtual_memory().total
    rows = []
    for cell in protocol.cells(protocol.read(name), scale):
        if cell.value("precision") == precision:
            needed = _estimate(cell, "cuda" if gpus else "cpu")
            rows.append({"arm": cell.arm} | room(needed, gpus[0].memory_bytes if gpus else None, host_bytes))
    return rows


def room(needed: Estimate, gpu_bytes: int | None, host_bytes: int) -> dict:
    """Needed and available memory. Without a GPU, the host holds everything."""
    if gpu_bytes is None:
        of_host = needed.peak_bytes + PROCESS_BYTES
        here = {"GPU memory": "there is no GPU", "host memory": f"{size(of_host)} of {size(host_bytes)}"}
        return here | {"fits": of_host <= host_bytes}
    of_host = needed.host_bytes + HOST_PROCESS_BYTES
    free = gpu_bytes - OUTSIDE_AT_MOST_BYTES - FRAGMENTATION * gpu_bytes
    here = {"GPU memory": f"{size(needed.peak_bytes)} of {size(free)}"}
    here |= {"host memory": f"{size(of_host)} of {size(host_bytes)}"}
    return here | {"fits": needed.peak_bytes <= free and of_host <= host_bytes}


def _estimate(cell: Cell, device: str) -> Estimate:
    settings = {name: cell.value(name) for name in ("precision", "micro_batch")}
    sequence, model = cell.value("sequence") or SEQUENCE, named(shape_of(str(cell.value("model"))))
    return estimate(Setup.of_arm(model, cell.arm, ranks=cell.ranks or 1, sequence=sequence, device=device, **settings))
