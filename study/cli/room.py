"""Checks before anything is built whether the host has enough memory. Needs no torch."""

import psutil

from study.core.arms import Arm
from study.core.errors import Stop
from study.core.numbers import size
from study.core.settings import Settings
from study.core.shapes import SHAPES
from study.predict.front import HOST_PROCESS_BYTES, VIRTUAL_PROCESS_BYTES, Setup, distribution, estimate, named
from study.sweeps.protocol import Cell


def check(settings: Settings, arm: Arm, gpu: bool) -> None:
    """Refuse virtual ranks that this machine has not enough memory for."""
    needed = needed_bytes(settings, arm, gpu)
    available = psutil.virtual_memory().available
    if needed > available:
        what = f"rank 0 is predicted to need {size(needed)} of memory with values, and {size(available)} are available"
        raise Stop(what, "give --init none, which needs no memory", "unavailable")


def needed_bytes(settings: Settings, arm: Arm, gpu: bool) -> float:
    """Host memory that a virtual rank with values is known to need.

    On a GPU this is what the arm offloads. The GPU itself will tell whether the rest fits.
    """
    if settings.init == "none":
        return 0
    ranks = settings.virtual_ranks or 1
    values = distribution(arm, ranks) | {"ranks": ranks, "device": "cuda" if gpu else "cpu"}
    prediction = estimate(Setup.of_settings(named(settings.model), settings, **values))
    # Random weights are drawn whole and in fp32 before stage 3 takes its part. Loaded weights are never all in memory.
    drawn = 4 * prediction.parameters if settings.init == "random" else 0
    return VIRTUAL_PROCESS_BYTES + max(drawn, prediction.host_bytes if gpu else prediction.peak_bytes)


def no_host_memory(cell: Cell, gpus: int) -> Stop | None:
    """Return why the host cannot hold what a cell offloads from its GPUs, or None if it can.

    Linux would kill the ranks silently.
    """
    model, virtual, ranks = str(cell.value("model")), cell.value("virtual_ranks"), cell.ranks or 1
    if not gpus or model not in SHAPES:
        return None
    setup = Setup.of_arm(
        named(model), cell.arm, ranks=virtual or ranks, precision=cell.value("precision"), micro_batch=1, device="cuda"
    )
    offloaded = estimate(setup).host_bytes
    needed = (offloaded + HOST_PROCESS_BYTES) * (1 if virtual else ranks)
    has_bytes = psutil.virtual_memory().total
    if not offloaded or needed <= has_bytes:
        return None
    what = f"{cell.arm} would need {size(needed)} of host memory for {model}; the host has {size(has_bytes)}"
    return Stop(what, "use a host with more memory, or a smaller model", "unavailable")
