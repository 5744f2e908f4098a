"""Trains a part of a model: only some tensors, or small matrices beside frozen ones (LoRA, arXiv 2106.09685)."""

import re

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from study.errors import Stop

CLASSIFIERS = ("classifier", "score")  # transformers' names of heads with new random weights, which have to train


class Adapted(nn.Module):
    """A frozen linear layer plus the product of two thin matrices that train."""

    def __init__(self, base: nn.Linear | Conv1D, rank: int):
        super().__init__()
        dtype = base.weight.dtype
        inputs, outputs = (base.nx, base.nf) if isinstance(base, Conv1D) else (base.in_features, base.out_features)
        self.base = base
        self.down = nn.Linear(inputs, rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, outputs, bias=False, dtype=dtype)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def freeze(model: nn.Module, lora_rank: int | None = None, train_only: str | None = None) -> None:
    """Freeze a model, except adapters at every linear layer and a classifier, or tensors with matching names."""
    if lora_rank is None and train_only is None:
        return
    for name, tensor in model.named_parameters():
        is_head = lora_rank is not None and name.split(".")[0] in CLASSIFIERS
        tensor.requires_grad_(is_head or (train_only is not None and re.search(train_only, name) is not None))
    if lora_rank is not None:
        head = model.get_output_embeddings()
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                is_layer = isinstance(child, (nn.Linear, Conv1D)) and child is not head
                if is_layer and not child.weight.requires_grad and not isinstance(module, Adapted):
                    setattr(module, name, Adapted(child, lora_rank))
    if not any(tensor.requires_grad for tensor in model.parameters()):
        raise Stop(f"no tensor of the model matches --train-only {train_only}", "give a part of a tensor's name")
    # Checkpointed layers need an input with a gradient, and frozen embeddings give none.
    model.enable_input_require_grads()
