"""Bytes of activations from moment to moment of a forward and backward pass: what a trace of a model shows.

Weights, complete gradients and all that the engine holds come on top (`deepspeed_memory.py`, `fsdp_memory.py`).
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple


@dataclass(frozen=True)
class Tensor:
    """A parameter tensor. `block` is "embeddings", "layer.<i>" or "head". Frozen tensors have no gradient."""

    name: str
    shape: tuple[int, ...]
    block: str
    trains: bool = True
    packed: bool = False  # quantized: its shape is that of the packed weights

    @functools.cached_property
    def elements(self) -> int:
        return prod(self.shape)


class Held(NamedTuple):
    """Bytes of activations at a moment: from the forward pass, and made by the backward pass."""

    kept: float
    in_use: float

    @property
    def total(self) -> float:
        return self.kept + self.in_use


class Gradient(NamedTuple):
    """Bytes that are held until a tensor's gradient is complete. The gradient itself is not included."""

    tensor: Tensor
    most: Held  # the most since the gradient before it
    complete: Held  # when it is complete, and the engine takes it


@dataclass(frozen=True)
class Profile:
    """A forward and a backward pass over a microbatch."""

    kept: int  # at the end of the forward pass
    most: Held  # the most until the first gradient is complete: forward pass, loss, gradient of the logits
    at_use: Mapping[str, float]  # kept when the forward pass reaches a tensor
    before_use: Mapping[str, Held]  # the most until the forward pass reaches a module, by its first tensor
    gradients: tuple[Gradient, ...]  # in the order of the backward pass
