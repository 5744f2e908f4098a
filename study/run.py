"""A prepared run: what was asked for, the objects that do it, and what all its ranks say together."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator

from study import record
from study.arms import Arm
from study.data import Data
from study.settings import Settings


@dataclass
class Run:
    """A run from the moment its accelerator is open."""

    settings: Settings
    arm: Arm
    folder: Path
    record: dict
    accelerator: Accelerator
    data: Data
    steps: int
    model: torch.nn.Module = None
    optimizer: torch.optim.Optimizer = None

    @property
    def rows_per_step(self) -> int:
        return rows_per_step(self.settings, self.accelerator)

    def keep(self) -> None:
        """Write the record as it stands: what is known by now stays known if the run fails."""
        if self.accelerator.is_main_process:
            record.keep(self.folder, self.record)

    def gathered(self, thing) -> list:
        """What every rank has to say, in the order of the ranks."""
        if not dist.is_initialized():
            return [thing]
        out: list = [None] * self.accelerator.num_processes
        dist.all_gather_object(out, thing)
        return out

    def mean_losses(self, losses: list[torch.Tensor]) -> list[float]:
        """The loss of each step, averaged over the ranks: one collective for all of them."""
        return self.accelerator.reduce(torch.stack(losses), "mean").tolist()


def rows_per_step(settings: Settings, accelerator: Accelerator) -> int:
    """Rows that one optimizer step learns from, over all ranks and microbatches: the effective batch."""
    return settings.micro_batch * settings.accumulation * accelerator.num_processes
