"""A run in progress: what was asked for, the objects that do it, its windows of steps and what is shown of them."""

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
    disk: Path | None = None  # the folder it may offload to
    source: "Source | None" = None  # the checkpoint it goes on from
    steps: int = 0
    timed_from: int = 0  # so many steps come before the timed ones
    model: torch.nn.Module = None
    optimizer: torch.optim.Optimizer = None
    heartbeat: Heartbeat | None = None

    @property
    def is_virtual(self) -> bool:
        return self.settings.virtual_ranks is not None

    @property
    def has_values(self) -> bool:
        """Whether its tensors have memory behind them; if not, its times mean nothing."""
        return self.settings.init != "none"

    @property
    def processes(self) -> int:
        """How many ranks really exist: one in a virtual run."""
        return 1 if self.is_virtual else self.accelerator.num_processes

    @property
    def row_groups(self) -> int:
        """How many of the existing processes read rows of their own: of those that share rows, one."""
        return max(1, self.processes // self.arm.row_ranks)

    @property
    def rows_taken_per_step(self) -> int:
        """Rows that the existing processes take from the data."""
        return self.settings.micro_batch * self.settings.accumulation * self.row_groups

    def at(self, place: str) -> None:
        """Leave word of where this rank is: never between the first and the last step of a window."""
        if self.heartbeat is not None:
            self.heartbeat.beat(place)

    def keep(self) -> None:
        """Write the record as it stands, so that what is known by now survives a failure."""
        if self.accelerator.is_main_process:
            store.keep(self.folder, self.record)

    def gathered(self, value) -> list:
        """This value of every rank, in order. A virtual run has only the first."""
        if self.is_virtual or not dist.is_initialized():
            return [value]
        out: list = [None] * self.accelerator.num_processes
        dist.all_gather_object(out, value)
        return out

    def mean_losses(self, losses: list[torch.Tensor]) -> list[float]:
        """The loss of each step, averaged over the ranks: one collective for all of them. Empty in a virtual run.

        Added rank by rank: gloo's all-reduce adds three and more in an order that depends on a step's place.
        """
        if self.is_virtual or not losses:
            return []
        of_ranks = self.accelerator.gather(torch.stack(losses).unsqueeze(0))
        return (sum(of_ranks) / len(of_ranks)).tolist()


@dataclass
class History:
    """What the training loop leaves: a loss and a rate for every step; times, energy and disk of the timed ones."""

    losses: list[torch.Tensor] = field(default_factory=list)  # of this process
    earlier_losses: list[float] = field(default_factory=list)  # of the run that it goes on from
    rates: list[float] = field(default_factory=list)
    evals: list[Evaluation] = field(default_factory=list)
    last_batch: Rows | None = None
    clock: Clock = field(default_factory=Clock)
    energy_j: list[float | None] = field(default_factory=list)
    disk_before: dict[str, int | None] | None = None
    link_before: LinkTraffic | None = None  # on an emulated cluster
    link: LinkTraffic | None = None  # of the timed steps
    peaks: RankMemory | None = None  # of the timed steps


def windows(run: Run, start: int, stop: int) -> Iterator[range]:
    """Steps cut into windows: the warm-up first, then `log_every` at a time, ending where an epoch or a span ends."""
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
    """This rank's rows for each step of a window, in the order that seed and epoch decide, ready to be copied.

    The order is over all rows, so that it is the same however many ranks share it.
    """
    rows, count = run.data.train, run.data.train_rows
    epoch, first = divmod(window[0], count // run.rows_taken_per_step)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(run.settings.seed * 1000 + epoch))
    steps = order[first * run.rows_taken_per_step : (first + len(window)) * run.rows_taken_per_step]
    shape = (len(window), run.settings.accumulation, run.row_groups, run.settings.micro_batch)
    group, place = divmod(run.accelerator.process_index, run.arm.row_ranks)
    mine = steps.view(shape)[:, :, group]
    chosen = {name: values[mine] for name, values in rows.items()}
    if run.arm.sequence_ranks > 1:
        chosen = part_of_rows(chosen, place, run.arm.sequence_ranks)
    if CUDA and run.has_values:
        chosen = {name: values.pin_memory() for name, values in chosen.items()}
    return [{name: values[i] for name, values in chosen.items()} for i in range(len(window))]


def show(run: Run, window: range, history: History) -> None:
    """Between windows: fetch and write the losses, print the last one, and stop if the run has diverged."""
    values = run.mean_losses(history.losses[-len(window) :])
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
    """Append values of a step to the run's file, and send them to the trackers: called between windows only."""
    store.append_step(run.folder, {"step": step} | values)
    run.accelerator.log({name: value for name, value in values.items() if value is not None}, step=step)
