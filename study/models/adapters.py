"""Training a part of a model: only some tensors, or small matrices beside frozen ones (LoRA, arXiv 2106.09685)."""

import re

import torch
from torch import nn

from study.errors import Stop


class Adapted(nn.Module):
    """A linear layer that is frozen, plus the product of two thin matrices that train."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        dtype = base.weight.dtype
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=dtype)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def freeze(model: nn.Module, lora_rank: int | None = None, train_only: str | None = None) -> None:
    """Freeze a model but for adapters of this rank at every linear layer but the head, or for tensors with names that a
    regular expression matches."""
    if lora_rank is None and train_only is None:
        return
    for name, tensor in model.named_parameters():
        tensor.requires_grad_(train_only is not None and re.search(train_only, name) is not None)
    if lora_rank is not None:
        head = model.get_output_embeddings()
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and child is not head and not isinstance(module, Adapted):
                    setattr(module, name, Adapted(child, lora_rank))
    if not any(tensor.requires_grad for tensor in model.parameters()):
        raise Stop(f"no tensor of the model trains with --train-only {train_only}", "give a part of a tensor's name")
    # Checkpointed layers need an input with a gradient, which frozen embeddings do not give.
    model.enable_input_require_grads()
