"""Measures the time of the timed steps. Within a timed window it only reads a clock."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator

import torch

from study.measure.hardware import CUDA

wait: Callable[[], object] = torch.cuda.synchronize if CUDA else lambda: None  # on a GPU the host runs ahead


class Clock:
    """Seconds per step. On a GPU, events mark the steps and are read after the window, so that no step waits."""

    def __init__(self):
        self.step_s: list[float] = []
        self.window_s: list[float] = []  # the sum of the steps of each window

    @contextlib.contextmanager
    def window(self, barrier: Callable[[], object]) -> Iterator[Callable[[], object]]:
        """Time consecutive steps. Yields `tick`, to be called once at the end of every step."""
        barrier()
        wait()  # what a window began would count for the next one
        marks = [now()]  # after the barrier, so that no waiting for other ranks counts
        yield lambda: marks.append(now())
        wait()
        step_s = seconds_between(marks)
        self.step_s += step_s
        self.window_s.append(sum(step_s))


def seconds_between(marks: list) -> list[float]:  # on a GPU they have been passed
    pairs = itertools.pairwise(marks)
    if CUDA:
        return [begin.elapsed_time(end) / 1000 for begin, end in pairs]  # events count in ms
    return [end - begin for begin, end in pairs]


def now() -> float | torch.cuda.Event:
    """Mark this moment; on a GPU, of the work that was started before it."""
    if not CUDA:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
