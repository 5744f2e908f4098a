"""A run in progress: its settings and objects, its windows of steps, and the output between windows."""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from accelerate import Accelerator

from study.errors import Stop
from study.measure.clock import Clock
from study.measure.collectives import Heartbeat
from study.measure.hardware import CUDA
from study.records import store
from study.records.schema import Evaluation, LinkTraffic, RankMemory, Record
from study.spec.arms import Arm
from study.spec.settings import Settings
from study.training.data import Data, Rows, part_of_rows
from study.training.log import say

if TYPE_CHECKING:
    from study.training.checkpoints import Source


@dataclass
class Run:
    """A run from the moment its accelerator is open."""

    settings: Settings
    arm: Arm
    folder: Path
    record: Record  # only the first rank's is written
    accelerator: Accelerator
    data: Data
    disk: Path | None = None  # the folder for offloading
    source: "Source | None" = None  # the checkpoint to resume from
    steps: int = 0
    timed_from: int = 0  # the number of steps before the timed ones
    model: torch.nn.Module = None
    optimizer: torch.optim.Optimizer = None
    heartbeat: Heartbeat | None = None

    @property
    def is_virtual(self) -> bool:
        return self.settings.virtual_ranks is not None

    @property
    def has_values(self) -> bool:
        """Whether its tensors have values. Without values, times mean nothing."""
        return self.settings.init != "none"

    @property
    def processes(self) -> int:
        """The number of ranks that really exist: 1 in a virtual run."""
        return 1 if self.is_virtual else self.accelerator.num_processes

    @property
    def row_groups(self) -> int:
        """The number of groups of existing processes that read different rows. Ranks that share rows are one group."""
        return max(1, self.processes // self.arm.row_ranks)

    @property
    def rows_taken_per_step(self) -> int:
        """Rows that the existing processes take from the data in a step."""
        return self.settings.micro_batch * self.settings.accumulation * self.row_groups

    def at(self, position: str) -> None:
        """Write into the heartbeat file where this rank is. Not to be called within a window of steps."""
        if self.heartbeat is not None:
            self.heartbeat.beat(position)

    def keep(self) -> None:
        """Write the record now, so that its content survives a failure."""
        if self.accelerator.is_main_process:
            store.keep(self.folder, self.record)

    def gathered(self, value) -> list:
        """The values of all ranks, in order. A virtual run has only the first."""
        if self.is_virtual or not dist.is_initialized():
            return [value]
        out: list = [None] * self.accelerator.num_processes
        dist.all_gather_object(out, value)
        return out

    def mean_losses(self, losses: list[torch.Tensor]) -> list[float]:
        """The loss of each step, averaged over the ranks, with one collective for all steps. Empty in a virtual run.

        The sum goes rank by rank: in gloo's all-reduce of three or more ranks, the order of the sum depends on the
        position of a step in the list.
        """
        if self.is_virtual or not losses:
            return []
        losses_of_ranks = self.accelerator.gather(torch.stack(losses).unsqueeze(0))
        return (sum(losses_of_ranks) / len(losses_of_ranks)).tolist()


@dataclass
class History:
    """Collects losses and rates of all steps, and times, energy and disk traffic of the timed steps."""

    losses: list[float] = field(default_factory=list)  # averaged over the ranks; also of the run that it resumes
    rates: list[float] = field(default_factory=list)
    evals: list[Evaluation] = field(default_factory=list)
    last_batch: Rows | None = None
    clock: Clock = field(default_factory=Clock)
    disk_before: dict[str, int | None] | None = None
    link_before: LinkTraffic | None = None  # on an emulated cluster
    link: LinkTraffic | None = None  # of the timed steps
    peaks: RankMemory | None = None  # of the timed steps


def windows(run: Run, start: int, stop: int) -> Iterator[range]:
    """Divide the steps into windows: the warm-up, then `log_every` steps each. Epochs and intervals end a window."""
    settings = run.settings
    per_epoch = run.data.train_rows // run.rows_taken_per_step
    while start < stop:
        ends = [stop, start + per_epoch - start % per_epoch]
        if start >= settings.warmup_steps:
            ends.append(start + settings.log_every - (start - settings.warmup_steps) % settings.log_every)
        for every in filter(None, (settings.eval_every, settings.checkpoint_every)):
            ends.append(start + every - start % every)
        if start < (settings.dies_after or 0):
            ends.append(settings.dies_after)
        run.at(f"steps {start + 1} to {min(ends)} of {run.steps}")
        yield range(start, min(ends))
        start = min(ends)


def arrange(run: Run, window: range) -> list[Rows]:
    """This rank's rows for each step of a window, ready to be copied to the device. Seed and epoch decide the order.

    The order is over all rows, so that it does not depend on the number of ranks.
    """
    rows, count = run.data.train, run.data.train_rows
    epoch, first = divmod(window[0], count // run.rows_taken_per_step)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(run.settings.seed * 1000 + epoch))
    steps = order[first * run.rows_taken_per_step : (first + len(window)) * run.rows_taken_per_step]
    shape = (len(window), run.settings.accumulation, run.row_groups, run.settings.micro_batch)
    group, part = divmod(run.accelerator.process_index, run.arm.row_ranks)
    rows_of_group = steps.view(shape)[:, :, group]
    chosen = {name: values[rows_of_group] for name, values in rows.items()}
    if run.arm.sequence_ranks > 1:
        chosen = part_of_rows(chosen, part, run.arm.sequence_ranks)
    if CUDA and run.has_values:
        chosen = {name: values.pin_memory() for name, values in chosen.items()}
    return [{name: values[i] for name, values in chosen.items()} for i in range(len(window))]


def show(run: Run, window: range, history: History, losses: list[torch.Tensor]) -> None:
    """Between windows: fetch and write the losses, print the last one, and stop if the run has diverged."""
    values = run.mean_losses(losses)
    history.losses += values
    if run.accelerator.is_main_process:
        for step, loss in zip(window, values or [None] * len(window), strict=True):
            finite = loss if loss is not None and math.isfinite(loss) else None
            write_step(run, step + 1, {"loss": finite, "lr": history.rates[step]})
        timed, step_s = window.stop > run.timed_from, history.clock.step_s
        speed = f"{statistics.median(step_s[-len(window) :]):.3f} s/step" if timed else "warm-up"
        speed = speed if run.has_values else "no values"
        loss = f"loss {values[-1]:.4f}" if values else f"virtual, rank 0 of {run.settings.virtual_ranks}"
        if timed:
            run.accelerator.log({"s/step": statistics.median(step_s)}, step=window.stop)
        say(run.folder, f"  step {window.stop:>5} of {run.steps}  {loss}  {speed}")
    if values and not all(math.isfinite(value) for value in values):
        raise Stop(f"the loss is no longer finite by step {window.stop}", "give a lower --lr", "diverged", "train")


def report(run: Run, result: Evaluation) -> None:
    """Write and print an evaluation."""
    values = result.model_dump(exclude_none=True, exclude={"step"})
    write_step(run, result.step, values)
    texts = [f"{name} {value:.4f}" for name, value in values.items()]
    say(run.folder, f"  step {result.step:>5}  {'  '.join(texts)}")


def write_step(run: Run, step: int, values: dict) -> None:
    """Append values of a step to the run's file, and send them to the trackers. Only called between windows."""
    store.append_step(run.folder, {"step": step} | values)
    run.accelerator.log({name: value for name, value in values.items() if value is not None}, step=step)
