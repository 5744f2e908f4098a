"""Time the phases of every step of a user's loop, and keep a line for each step in the rank's file.

A phase is the time between two marks, and the later mark names it. On a GPU a mark is an event, and a loss is copied
without waiting: both are read once the GPU has passed them.
"""

import math
import os
import time
from array import array
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from study.measure.clock import now, seconds_between
from study.measure.hardware import CUDA
from study.watch.trends import COLUMNS, FIELDS, FILE, PHASES, Table

FLUSH_S = 1.0
READ_S = 0.1  # between two looks at the memory, which take the kernel tens of microseconds
MOST_PENDING = 512  # steps that a GPU may be behind; their losses have a place in pinned memory
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Step:
    """The step in progress, and what is known of it when it has ended. NaN is unknown."""

    losses: list[torch.Tensor] = field(default_factory=list)  # as they were differentiated: they sum to the step's loss
    backwards: int = 0
    cleared: int = 0  # backward passes whose gradients were cleared before the update
    forwards: int = 0
    rows: float = 0.0
    tokens: float = 0.0
    evaluated: bool = False  # the model also ran outside training, or the step was to be left out
    clean: bool = True  # no instrument and no evaluation was in it
    rate: float = math.nan

    @property
    def passes(self) -> int:
        return self.backwards or self.forwards

    @property
    def loss(self) -> torch.Tensor | None:
        """The loss, on the device. None if a pass has no known loss."""
        if not self.losses or len(self.losses) != self.passes:
            return None
        return self.losses[0] if len(self.losses) == 1 else torch.stack([x.float() for x in self.losses]).sum()


class Pending(NamedTuple):
    """A step that is not in the table yet. Its first mark ended the step before."""

    marks: list[tuple[str, Any, float]]  # the phase that a mark ends, the mark, and seconds in it that ranks waited
    step: Step
    memory_bytes: float
    loss: float | torch.Tensor


class StepLog:
    """The steps of this rank, as a table and as a file. A step only notes its marks: rows are made once a second."""

    def __init__(self, folder: Path, rank: int):
        self.path = folder / FILE.format(rank=rank)
        self.path.write_text(",".join(COLUMNS) + "\n")
        self.waited_s = 0.0  # for other ranks, since the last mark
        self.stopped = False
        self.knows_losses = True  # of all steps
        self.count = 0
        self._values = array("d")  # of all steps, a row of COLUMNS each
        self._written = 0
        self._flushed_s = time.monotonic()
        self._losses = torch.full((MOST_PENDING + 1,), math.nan, pin_memory=CUDA)
        self._statm = os.open("/proc/self/statm", os.O_RDONLY) if Path("/proc/self/statm").exists() else None
        self._held_bytes = math.nan
        self._read_s = -math.inf
        self._pending: deque[Pending] = deque()
        self._marks: list[tuple[str, Any, float]] = []
        self.begin()

    def begin(self) -> None:
        """Let the first step begin now."""
        self._end_unix_s = time.time()
        self._marks = [("", now(), 0.0)]

    @property
    def phase(self) -> str:
        """The phase that the last mark has ended."""
        return self._marks[-1][0]

    def mark(self, phase: str) -> None:
        """End a phase here."""
        if not self.stopped:
            self._marks.append((phase, now(), self.waited_s))
            self.waited_s = 0.0

    def add(self, step: Step) -> None:
        """Add the step that ended with the last mark."""
        self.count += 1
        loss = step.loss
        self.knows_losses &= loss is not None
        self._pending.append(Pending(self._marks, step, self._memory_bytes(), self._value(loss)))
        step.losses.clear()
        self._marks = [("", self._marks[-1][1], 0.0)]
        if len(self._pending) > MOST_PENDING or time.monotonic() - self._flushed_s >= FLUSH_S:
            self.flush()

    def finish(self) -> None:
        """Write the last steps. On a GPU this waits for them."""
        self.stopped = True
        self.flush(most_pending=0)
        if self._statm is not None:
            os.close(self._statm)
            self._statm = None

    def table(self) -> Table:
        """Return the steps that are over on the device."""
        return self.recent(self.count)

    def recent(self, steps: int) -> Table:
        """Return the last so many of them."""
        self._settle(MOST_PENDING)
        return np.array(self._values[-steps * len(COLUMNS) :]).view(FIELDS)

    def flush(self, most_pending: int = MOST_PENDING) -> None:
        """Write the steps that are not in the file yet. If more are pending on a GPU, wait for it."""
        self._settle(most_pending)
        self._flushed_s = time.monotonic()
        rows = range(self._written, len(self._values), len(COLUMNS))
        text = "".join(",".join(f"{x:.16g}" for x in self._values[row : row + len(COLUMNS)]) + "\n" for row in rows)
        self._written = len(self._values)
        with self.path.open("a") as file:
            file.write(text)

    def _settle(self, most_pending: int) -> None:
        """Move the steps that the device has passed into the table."""
        while self._pending:
            last = self._pending[0].marks[-1][1]
            if isinstance(last, torch.cuda.Event) and not last.query():
                if len(self._pending) <= most_pending:
                    return
                last.synchronize()
            self._row(self._pending.popleft())

    def _row(self, pending: Pending) -> None:
        number = len(self._values) // len(COLUMNS) + 1
        spent = dict.fromkeys(PHASES, 0.0)
        between = seconds_between([mark for _, mark, _ in pending.marks])
        for (phase, _, waited_s), seconds in zip(pending.marks[1:], between, strict=True):
            waited_s = min(waited_s, seconds)
            spent[phase] += seconds - waited_s
            spent["waiting"] += waited_s
        self._end_unix_s += sum(between)
        step = pending.step
        sizes = step.passes, step.rows or math.nan, step.tokens or math.nan
        head = (number, self._end_unix_s, step.clean, *sizes, step.rate)
        self._values.extend((*head, float(pending.loss), pending.memory_bytes, *spent.values()))

    def _value(self, loss: torch.Tensor | None) -> float | torch.Tensor:
        """Return a loss, or its place in pinned memory, to which a GPU copies it. NaN if unknown."""
        if loss is None:
            return math.nan
        if not loss.is_cuda:
            return float(loss)
        place = self._losses[self.count % len(self._losses)]
        return place.copy_(loss.detach().reshape(()), non_blocking=True)

    def _memory_bytes(self) -> float:
        """Return the bytes of tensors on the GPU, or what this process holds of the host's memory: a moment ago."""
        if time.monotonic() - self._read_s < READ_S:
            return self._held_bytes
        self._read_s = time.monotonic()
        if CUDA:
            self._held_bytes = torch.cuda.memory_allocated()
        elif self._statm is not None:
            self._held_bytes = int(os.pread(self._statm, 64, 0).split()[1]) * PAGE_BYTES
        return self._held_bytes
