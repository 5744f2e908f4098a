"""Measures time and energy of the timed steps. Within a timed window it only reads a clock."""

import contextlib
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

    @contextlib.contextmanager
    def window(self, barrier: Callable[[], object]) -> Iterator[Callable[[], object]]:
        """Time consecutive steps. Yields `tick`, to be called once at the end of every step."""
        barrier()
        if CUDA:
            torch.cuda.synchronize()
        marks = [_now()]
        yield lambda: marks.append(_now())
        if CUDA:
            torch.cuda.synchronize()
        step_s = _between(marks)
        self.step_s += step_s
        self.window_s.append(sum(step_s))


class Marks:
    """Seconds per step of a user's own loop: a mark after each step, without waiting."""

    FAR = 256  # after so many steps a GPU has passed a mark, so that reading it does not wait

    def __init__(self):
        self._marks, self._step_s = [_now()], []

    def tick(self) -> None:
        self._marks.append(_now())
        if len(self._marks) > 2 * self.FAR:  # a long run does not keep all its events
            self._step_s += _between(self._marks[: self.FAR + 1])
            del self._marks[: self.FAR]

    def read(self) -> list[float]:
        """The seconds of every step, including the first. On a GPU this waits for the last step."""
        if CUDA:
            self._marks[-1].synchronize()
        return self._step_s + _between(self._marks)


def _between(marks: list) -> list[float]:
    return [a.elapsed_time(b) / 1000 if CUDA else b - a for a, b in itertools.pairwise(marks)]


def _now() -> float | torch.cuda.Event:
    if not CUDA:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Energy:
    """Joules of this process's GPU since this object was created, by NVML's counter; None without such a counter."""

    def __init__(self):
        self._handle = None
        if CUDA:
            import pynvml

            try:
                pynvml.nvmlInit()
                uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
                self._read = pynvml.nvmlDeviceGetTotalEnergyConsumption
                self._start = self._read(self._handle)
            except pynvml.NVMLError:
                self._handle = None

    def joules(self) -> float | None:
        return (self._read(self._handle) - self._start) / 1000 if self._handle else None
