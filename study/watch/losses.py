"""By what a script has divided its loss, read from the graph of the backward pass. No value on a GPU is read."""

from dataclasses import dataclass
from typing import Any

import torch

# Operations that change a loss by no factor. What else is below a loss belongs to the model, and is not read.
PASSED = ("ToCopy", "Clone", "View", "Squeeze", "Unsqueeze", "ReshapeAlias", "Alias", "Neg")
SINK = "_DDPSink"  # DDP's, around all outputs of the model, if it looks for unused parameters
DEEPEST = 12


@dataclass
class Division:
    """What a script does to a loss before backward."""

    divisors: list[float]  # by numbers, the last one first; a factor is the division by its inverse
    base: str | None = None  # mean, sum, or items: a sum that was divided; None if that cannot be read
    is_negated: bool = False  # a loss of torch's, of which less is better


def division_of(loss: torch.Tensor) -> Division:
    """Return by what this loss was divided, down to the mean or the sum that it was."""
    seen = Division([])
    node: Any = loss.grad_fn
    place = loss.output_nr
    negations = 0
    for _ in range(DEEPEST):
        name = type(node).__name__.rstrip("0123456789").removesuffix("Backward")
        if name in ("Div", "Mul"):
            other = node._saved_other
            if other is None or not other.is_cpu or other.ndim or not other:  # a tensor, on a GPU perhaps
                return seen
            number = float(other)
            seen.divisors.append(number if name == "Div" else 1 / number)
        elif name not in PASSED and name != SINK:
            seen.base = _base(node, name)
            seen.is_negated = hasattr(node, "_saved_reduction") and negations % 2 == 1
            break
        negations += name == "Neg"
        node, place = node.next_functions[place if name == SINK else 0]
    if seen.base == "sum" and seen.divisors:
        seen.base = "items"
        seen.divisors.pop()  # it makes a mean of the sum
    return seen


def _base(node: Any, name: str) -> str | None:
    reduction = getattr(node, "_saved_reduction", None)  # torch's own: 1 is a mean, 2 a sum
    if name == "Mean" or reduction == 1:
        return "mean"
    return "sum" if name == "Sum" or reduction == 2 else None
