"""A run in progress: its settings and objects, and its windows of steps."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from study.core.arms import Arm
from study.core.errors import Stop
from study.core.settings import Settings
from study.measure.clock import Clock
from study.measure.hardware import CUDA
from study.measure.heartbeat import Heartbeat
from study.records import store
from study.records.schema import Record
from study.records.sections import Evaluation, RankMemory
from study.training.data import Data, Rows, part_of_rows
from study.training.display import print_window


@dataclass
class OpenRun:
    """A run: what is known when its folder is open, and what follows step by step."""

    settings: Settings
    arm: Arm
    folder: Path
    record: Record  # only the first rank's is written
    heartbeat: Heartbeat
    accelerator: Accelerator = field(init=False)
    data: Data = field(init=False)
    model: Any = field(init=False)  # both as Accelerate returns them
    optimizer: AcceleratedOptimizer = field(init=False)
    steps: int = 0
    timed_from: int = 0  # the number of steps before the timed ones

    @property
    def is_virtual(self) -> bool:
        return self.settings.virtual_ranks is not None

    @property
    def has_values(self) -> bool:
        return self.settings.init != "none"  # without, times mean nothing

    @property
    def row_groups(self) -> int:
        """Return the number of groups of existing processes that read different rows."""
        return 1 if self.is_virtual else self.accelerator.num_processes // self.arm.row_ranks

    @property
    def rows_taken_per_step(self) -> int:
        """Return the rows that the existing processes take from the data in a step."""
        return self.settings.micro_batch * self.settings.accumulation * self.row_groups

    def keep(self) -> None:
        """Write the record now, so that its content survives a failure."""
        if self.record.status == "done":
            self.record.finished_utc = store.now_utc()
        if self.accelerator.is_main_process:
            store.keep(self.folder, self.record)

    def gathered(self, value) -> list:
        """Return the values of all ranks, in order. A virtual run has only the first."""
        if self.is_virtual or not dist.is_initialized():
            return [value]
        out: list = [None] * self.accelerator.num_processes
        dist.all_gather_object(out, value)
        return out

    def mean_losses(self, losses: list[torch.Tensor]) -> list[float]:
        """Return the loss of each step, averaged over the ranks, with one collective. Empty in a virtual run."""
        if self.is_virtual:
            return []
        losses_of_ranks = self.accelerator.gather(torch.stack(losses).unsqueeze(0))
        # Rank by rank: in gloo's all-reduce of three or more, the order depends on a step's position in the list.
        total = sum(losses_of_ranks[1:], start=losses_of_ranks[0])
        return (total / len(losses_of_ranks)).tolist()


class History:
    """Collects losses and rates of all steps, and times and disk traffic of the timed steps of this process."""

    def __init__(self):
        self.losses: list[float] = []  # averaged over the ranks
        self.rates: list[float] = []
        self.evals: list[Evaluation] = []
        self.last_batch: Rows = {}
        self.clock = Clock()
        self.io_before: dict[str, int | None] = {}
        self.peaks = RankMemory()  # of the timed steps


def windows(run: OpenRun, start: int, stop: int) -> Iterator[range]:
    """Divide the steps into windows: the warm-up, then `log_every` steps each. Epochs and intervals end a window."""
    settings = run.settings
    per_epoch = run.data.train_rows // run.rows_taken_per_step
    while start < stop:
        ends = [stop, start + per_epoch - start % per_epoch]  # with an epoch the rows get a new order
        if start >= settings.warmup_steps:  # nothing is timed before, so nothing is shown of it but its end
            ends.append(start + settings.log_every - (start - settings.warmup_steps) % settings.log_every)
        for every in filter(None, (settings.eval_every, settings.save_every)):
            ends.append(start + every - start % every)
        end = min(ends)
        run.heartbeat.beat(f"steps {start + 1} to {end} of {run.steps}")
        yield range(start, end)
        start = end


def arrange(run: OpenRun, window: range) -> list[Rows]:
    """Return this rank's rows for each step of a window. Seed and epoch decide the order of all rows, for all ranks."""
    # A window never spans two epochs (see `windows`). Rows at the end of an epoch that fill no step are left out.
    count = run.data.train_rows
    epoch, first = divmod(window[0], count // run.rows_taken_per_step)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(run.settings.seed * 1000 + epoch))
    steps = order[first * run.rows_taken_per_step : (first + len(window)) * run.rows_taken_per_step]
    # Accumulation before groups: the same rows are one pass, however many ranks share it.
    shape = (len(window), run.settings.accumulation, run.row_groups, run.settings.micro_batch)
    group, part = divmod(run.accelerator.process_index, run.arm.row_ranks)
    mine = steps.view(shape)[:, :, group]
    chosen = {name: values[mine] for name, values in run.data.train.items()}
    if run.arm.sequence_ranks > 1:
        chosen = part_of_rows(chosen, part, run.arm.sequence_ranks)
    if CUDA and run.has_values:  # pinned memory can be copied while the GPU computes
        chosen = {name: values.pin_memory() for name, values in chosen.items()}
    return [{name: values[i] for name, values in chosen.items()} for i in range(len(window))]


def show(run: OpenRun, window: range, history: History, losses: list[torch.Tensor]) -> None:
    """Between windows: fetch and write the losses, print the last one, and stop if the run has diverged."""
    values = run.mean_losses(losses)  # waits for the device, which is why nothing does it within a window
    history.losses += values
    finite = [value if math.isfinite(value) else None for value in values]
    if run.accelerator.is_main_process:
        for step, loss in itertools.zip_longest(window, finite):
            store.append_step(run.folder, {"step": step + 1, "loss": loss, "lr": history.rates[step]})
        print_window(run, window, history, values)
    if None in finite:
        raise Stop(f"the loss is no longer finite by step {window.stop}", "give a lower --lr", "diverged", "train")
