"""What the activations of a forward and backward pass take, from moment to moment: all that memory needs to know of it.

A profile is the same whoever made it: formulas (`activations.py`), or a trace of the model (`tracing.py`). Weights,
gradients that are complete and everything of the engine come on top (`deepspeed_memory.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple


@dataclass(frozen=True)
class Tensor:
    """A parameter tensor. `block` is "embeddings", "layer.<i>" or "head"; a frozen one has no gradient."""

    name: str
    shape: tuple[int, ...]
    block: str
    trains: bool = True
    elements: int = field(init=False, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "elements", prod(self.shape))


class Held(NamedTuple):
    """Bytes of activations at a moment: from the forward pass, and made by the backward pass."""

    kept: float
    in_use: float

    @property
    def total(self) -> float:
        return self.kept + self.in_use


class Gradient(NamedTuple):
    """The moments of a parameter tensor's gradient, which is not counted in them."""

    tensor: Tensor
    most: Held  # at most, since the gradient before it
    complete: Held  # when it is complete, and the engine takes it


@dataclass(frozen=True)
class Profile:
    """A forward and a backward pass over a microbatch."""

    kept: int  # at the end of the forward pass
    most: Held  # until the first gradient is complete: in the forward pass, for the loss, and for the logits' gradient
    at_use: Mapping[str, float]  # kept when the forward pass has come to a tensor
    gradients: tuple[Gradient, ...]  # in the order of the backward pass
