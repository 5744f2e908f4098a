"""Sets the threads and the memory that a rank may use."""

import os

import torch

from study.errors import Stop
from study.machine.linux import cap_private_memory, usable_cores
from study.measure.hardware import CUDA
from study.records.schema import MemoryCap


def set_threads(threads: int | None, hosts: int | None = None) -> None:
    """Give every rank the same number of threads in every arm, also in `single`: a fair share of the cores.

    The hosts of an emulated cluster share the cores too.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) * (hosts or 1)
    threads = threads or max(1, usable_cores() // (ranks if CUDA else max(2, ranks)))
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for libraries that are loaded later
    torch.set_num_threads(threads)


def cap_memory(gib: float | None) -> MemoryCap | None:
    """Emulate a device with this much memory. Returns the cap as it was set, and what enforces it."""
    if gib is None:
        return None
    cap_bytes = int(gib * 2**30)
    if not CUDA:
        cap_private_memory(cap_bytes)
        return MemoryCap(bytes=cap_bytes, emulated_by="RLIMIT_DATA")
    has_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if cap_bytes > has_bytes:
        has_gib = has_bytes / 2**30
        what = f"--memory-cap-gib {gib:g} is more than the device's {has_gib:.1f} GiB"
        raise Stop(what, "give a smaller cap, or use a larger device", "unavailable")
    torch.cuda.set_per_process_memory_fraction(cap_bytes / has_bytes)
    return MemoryCap(bytes=cap_bytes, emulated_by="PyTorch's allocator")
