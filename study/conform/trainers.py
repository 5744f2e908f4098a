"""For the trainers of Transformers and TRL: before each update all ranks must have the same gradients.

    trainer = DPOTrainer(..., callbacks=[SameGradients()])

It needs no reference, and finds gradients that nobody averages: a loss that goes past DDP's forward pass trains one
model on each rank, without a message. Sharded gradients cannot be compared so.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from study.conform.cases import Unequal
from study.core.errors import Stop


class SameGradients(TrainerCallback):
    """Stops the training at the first update whose gradients differ between ranks."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            raise Stop("one rank has nothing to be compared with", "start the training by torchrun, on two ranks")
        gradients = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
        if all(each is None or isinstance(each, DTensor) for each in gradients.values()):
            raise Stop("each rank holds parts of the gradients, if any", "compare them with DDP")
        names = different(gradients, args.device)
        if names:
            raise Unequal(
                f"update {state.global_step + 1}: {len(names)} of {len(gradients)} gradients differ between ranks, "
                f"that of {names[0]} first"
            )


def different(gradients: dict[str, torch.Tensor | None], device: torch.device) -> list[str]:
    """Return the names of the gradients that differ between ranks; the same on all of them, so that none waits."""
    mine = torch.tensor([fingerprint(each) for each in gradients.values()], dtype=torch.float64, device=device)
    first = mine.clone()
    dist.broadcast(first, 0)
    differs = (mine != first).any(1).double()
    dist.all_reduce(differs)
    return [name for name, count in zip(gradients, differs.tolist(), strict=True) if count]


def fingerprint(gradient: torch.Tensor | None) -> list[float]:
    """Three numbers: whether there is a gradient, its sum, and that of its squares. Equal gradients have equal ones."""
    if gradient is None:
        return [0, 0, 0]
    numbers = torch.nan_to_num(gradient.detach().double())
    return [1, numbers.sum().item(), numbers.square().sum().item()]
