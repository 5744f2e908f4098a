"""Time the phases of every step of a user's loop, and keep a line for each step in the rank's file.

A phase is the time between two marks, and the later mark names it. On a GPU a mark is an event, and a loss is copied
without waiting: both are read once the GPU has passed them.
"""

import math
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from study.core.text import rounded, short
from study.measure.clock import now, seconds_between
from study.measure.hardware import CUDA
from study.watch.trends import COLUMNS, FILE, GROUPS, PHASES, Table, seconds, shares

FLUSH_S = 1.0

Mark = tuple[str, Any]  # the phase that it ends, and the moment


@dataclass
class Step:
    """The step in progress, and what is known of it when it has ended. NaN is unknown."""

    losses: list[torch.Tensor] = field(default_factory=list)  # of its passes: they sum to the step's loss
    backwards: int = 0
    cleared: int = 0  # backward passes whose gradients were cleared before the update
    begins_with_gradients: bool = False  # of the step before, in each of its backward passes
    other_updated: bool = False  # an optimizer of another model made an update
    forwards: int = 0
    rows: int = 0  # 0: unknown
    evaluated: bool = False  # the model also ran outside training, or the step was to be left out
    clean: bool = True  # no instrument and no evaluation was in it
    training: float = math.nan  # 0: the model was not in training mode
    dropouts_off: float = math.nan
    trained: float = math.nan
    clipped_in: float = math.nan  # the micro-batch
    norm: torch.Tensor | float = math.nan
    scheduled: set[int] = field(default_factory=set)  # micro-batches
    rates: list[float] = field(default_factory=list)
    scaled: bool = False  # by a GradScaler
    unscaled: bool = False
    loss: torch.Tensor | float = math.nan
    memory_bytes: int = 0
    marks: list[Mark] = field(default_factory=list)  # the first ended the step before


class StepLog:
    """The file with the steps of this rank. A step only notes its marks: rows are made once a second."""

    def __init__(self, folder: Path, rank: int):
        self.path = folder / FILE.format(rank=rank)
        self.path.write_text(",".join(COLUMNS) + "\n")
        self.knows_losses = True  # of all steps
        self.count = 0
        self._written = 0
        self._flushed_s = time.monotonic()
        self._process = psutil.Process()
        self._pending: deque[Step] = deque()
        self.marks: list[Mark] = [("", now())]  # the first step begins now

    def mark(self, phase: str) -> None:
        """End a phase here."""
        self.marks.append((phase, now()))

    def add(self, step: Step) -> None:
        """End a step here."""
        self.count += 1
        self.knows_losses &= 0 < step.backwards == len(step.losses)
        if self.knows_losses:
            # A new tensor, as the script may change its own. On a GPU it is copied into pinned memory.
            step.loss = torch.stack([each.float() for each in step.losses]).sum().to("cpu", non_blocking=True)
        if torch.is_tensor(step.norm):
            step.norm = step.norm.to("cpu", non_blocking=True)
        self.mark("update")  # after the copies: once the GPU has passed this mark, they can be read
        step.losses = []
        # Allocated and not reserved, as PyTorch's cache may grow without a leak. DeepSpeed also takes the resident
        # memory for what is allocated on a CPU (deepspeed/accelerator/cpu_accelerator.py:153). A look takes tens of
        # microseconds.
        step.memory_bytes = torch.cuda.memory_allocated() if CUDA else self._process.memory_info().rss
        step.marks = self.marks
        self.marks = [("", self.marks[-1][1])]
        self._pending.append(step)
        if time.monotonic() - self._flushed_s >= FLUSH_S:
            self.flush()

    def flush(self, wait: bool = False) -> None:
        """Write the steps that the device has passed, or all if it should wait for them."""
        self._flushed_s = time.monotonic()
        rows = []
        while self._pending:
            end = self._pending[0].marks[-1][1]
            if CUDA and wait:
                end.synchronize()
            elif CUDA and not end.query():
                break
            rows.append(self._row(self._pending.popleft()))
        with self.path.open("a") as file:
            np.savetxt(file, rows, "%.16g", ",")

    def _row(self, step: Step) -> tuple:
        """Return a step with COLUMNS, once the device has passed it."""
        self._written += 1
        spent = dict.fromkeys(PHASES, 0.0)
        between = seconds_between([moment for _, moment in step.marks])
        for (phase, _), passed_s in zip(step.marks[1:], between, strict=True):
            spent[phase] += passed_s
        passes = step.backwards or step.forwards
        timed = (self._written, step.clean, passes, step.rows, float(step.loss), step.memory_bytes, *spent.values())
        dynamics = (step.training, step.dropouts_off, step.trained, step.clipped_in, float(step.norm))
        rates = (step.rates + [math.nan] * GROUPS)[:GROUPS]
        return (*timed, *dynamics, len(step.scheduled), *rates)


def in_words(table: Table, device: str | None) -> str:
    """Return what steps were: `0.031 s a step (52% backward, 30% forward, ...), loss 2.31, GPU tensors 812 MB`."""
    largest = sorted(shares(table).items(), key=lambda part: -part[1])
    phases = ", ".join(f"{share:.0%} {phase}" for phase, share in largest if share >= 0.01)
    whose = "GPU tensors" if device == "cuda" else "whole host process"  # what `add` looked at
    last = f"loss {rounded(table['loss'][-1], '.4g')}, {whose} {table['memory_bytes'][-1] / 1e6:,.0f} MB"
    return f"{short(float(seconds(table).mean()))} s a step ({phases}), {last}"
