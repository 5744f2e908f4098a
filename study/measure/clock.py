"""Measures time and energy of the timed steps. Within a timed window it only reads a clock."""

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator

import torch

from study.measure.hardware import CUDA


class Clock:
    """Seconds per step. On a GPU, events mark the steps and are read after the window, so that no step waits."""

    def __init__(self):
        self.step_s: list[float] = []
        self.window_s: list[float] = []  # the sum of the steps of each window
        self.window_j: list[float] = []  # the energy of the GPU in each window

    @property
    def joules(self) -> float | None:
        """Return the energy of all windows. None if it was not counted."""
        return sum(self.window_j) if self.window_j else None

    @contextlib.contextmanager
    def window(self, barrier: Callable[[], object]) -> Iterator[Callable[[], object]]:
        """Time consecutive steps. Yields `tick`, to be called once at the end of every step."""
        barrier()
        # On a GPU the host runs ahead: without waiting, what a window began would count for the next one.
        if CUDA:
            torch.cuda.synchronize()
        # After the barrier and the synchronization, so that no waiting for other ranks counts.
        start_j = gpu_joules()
        marks = [now()]
        yield lambda: marks.append(now())
        if CUDA:
            torch.cuda.synchronize()
        end_j = gpu_joules()
        if start_j is not None and end_j is not None:
            self.window_j.append(end_j - start_j)
        step_s = seconds_between(marks)
        self.step_s += step_s
        self.window_s.append(sum(step_s))


def seconds_between(marks: list) -> list[float]:
    """Return the seconds between successive marks, which on a GPU have been passed."""
    if CUDA:
        return [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(marks)]  # events count in ms
    return [b - a for a, b in itertools.pairwise(marks)]


def now() -> float | torch.cuda.Event:
    """Mark this moment; on a GPU, of the work that was started before it."""
    if not CUDA:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def gpu_joules() -> float | None:
    """The energy that this process's GPU has used, by NVML's counter. None without a GPU or without that counter."""
    if not CUDA:
        return None
    import pynvml

    try:  # NVML counts in mJ, since the driver was loaded; GPUs before Volta do not count
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(_gpu_of_nvml()) / 1000
    except pynvml.NVMLError:
        return None


@functools.cache
def _gpu_of_nvml() -> object:
    import pynvml

    pynvml.nvmlInit()
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
