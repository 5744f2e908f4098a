"""What a script has made of its loss, read from the graph of the backward pass: functions, divisions, shapes."""

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

# Operations that change a value by no factor. What else is below a loss belongs to the model, and is not read.
PASSED = ("ToCopy", "Clone", "View", "Squeeze", "Unsqueeze", "ReshapeAlias", "Alias", "Neg", "UnsafeView")
CUT = (*PASSED, "Slice", "Index", "Select", "Transpose", "Permute", "T")  # and those that take a part of it
SINK = "_DDPSink"  # DDP's, around all outputs of the model, if it looks for unused parameters
MARKS = ("PreBackward", "PostBackward")  # DeepSpeed's, around the inputs and outputs of each module under stage 3
DEEPEST = 12
NODES = 64  # below a loss
LOSSES = ("NllLoss", "NllLoss2D", "MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropyWithLogits")
ROWS = 64  # that are read
NEAR = 0.01


@dataclass
class Division:
    """What a script does to a loss before backward."""

    divisors: list[float]  # by numbers, the last one first; a factor is the division by its inverse
    base: str | None = None  # mean, sum, or items: a sum that was divided; None if that cannot be read
    is_negated: bool = False  # a loss of torch's, of which less is better


def kind_of(node: Any) -> str:
    return type(node).__name__.rstrip("0123456789").removesuffix("Backward")


def division_of(loss: torch.Tensor) -> Division:
    """Return by what this loss was divided, down to the mean or the sum that it was. No value on a GPU is read."""
    seen = Division([])
    node: Any = loss.grad_fn
    place = loss.output_nr
    negations = 0
    for _ in range(DEEPEST):
        name = kind_of(node)
        if name in ("Div", "Mul"):
            other = node._saved_other
            if type(other) is not torch.Tensor or not other.is_cpu or other.ndim:  # it may be on a GPU
                return seen
            with _disable_current_modes():  # they cannot read a Python number
                number = float(other)
            if not number:
                return seen
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


def losses_in(loss: torch.Tensor) -> list[Any]:
    """Return the nodes of torch's losses of which a loss is made, the nearest first."""
    found = []
    waiting = deque([loss.grad_fn])
    for _ in range(NODES):
        node = waiting.popleft() if waiting else None
        if node is None:
            break
        if kind_of(node) in LOSSES:
            found.append(node)
        else:
            waiting += [below for below, _ in node.next_functions if below is not None]
    return found


def targets_of(node: Any) -> tuple[torch.Tensor, int] | None:
    """Return the classes that a cross-entropy gets, and the one that it ignores. None for another loss."""
    if not kind_of(node).startswith("NllLoss"):
        return None
    ignored = node._saved_ignore_index
    return node._saved_target, ignored - 2**64 if ignored >= 2**63 else ignored  # torch shows it without its sign


def _log_softmax(node: Any) -> Any:
    """Return the logarithm of probabilities in a cross-entropy, which takes logits. None in another loss."""
    if not kind_of(node).startswith("NllLoss"):
        return None
    below = _below(node)
    return below if kind_of(below) == "LogSoftmax" else None


def probabilities_into(node: Any) -> str | None:
    """Return the function that made probabilities of what a loss takes for logits: its loss has a floor above 0."""
    if kind_of(node) != "BinaryCrossEntropyWithLogits":
        node = _log_softmax(node)
    name = kind_of(_below(node))
    return name.lower() if name in ("Softmax", "Sigmoid") else None


def is_mixed(node: Any) -> bool:
    """Return whether a cross-entropy gets its classes by a view that exchanges sizes: it does not move the values."""
    with contextlib.suppress(AttributeError, IndexError):  # of a node in Python, or an older torch
        for below in _first_inputs(_log_softmax(node)):
            name = kind_of(below)
            if name not in PASSED:
                break
            if "View" not in name and name != "ReshapeAlias":
                continue
            before, after = tuple(below._saved_self_sym_sizes), tuple(below._input_metadata[0].shape)
            if before != after and sorted(before) == sorted(after) and len(after) > 2 and after[1] == before[-1]:
                return True
    return False


def is_no_logarithm(node: Any) -> bool:
    """Return whether nll_loss gets rows whose probabilities do not sum to 1. It reads some of them."""
    if kind_of(node) != "NllLoss":
        return False
    rows = node._saved_self.detach()[:ROWS].float()
    return bool((rows.logsumexp(1).abs() > NEAR).float().mean() > 1 / 2)


def is_broadcast(loss: torch.Tensor, found: list[Any]) -> bool:
    """Return whether a loss compares each result with each target, as their shapes differ: (8, 1) with (8,)."""
    for node in found:
        below = node.next_functions[0][0]
        if kind_of(node) in ("MseLoss", "SmoothL1Loss", "HuberLoss") and kind_of(below) == "Expand":
            return _grows(below)
    for node in (loss.grad_fn, *_first_inputs(loss.grad_fn)):  # a square or absolute value by hand
        if kind_of(node) == "Sub":
            return _grows(node)
        if kind_of(node) not in (*PASSED, "Mean", "Sum", "Pow", "Abs", "Div", "Mul"):
            break
    return False


def _grows(node: Any) -> bool:
    """Return whether results in a column become a square. What was unsqueezed may be meant, as for distances."""
    below = node.next_functions[0][0]
    if below is None or kind_of(below) in ("Unsqueeze", "AccumulateGrad"):
        return False
    with contextlib.suppress(AttributeError, IndexError):  # of a node in Python, or an older torch
        before, after = (tuple(each._input_metadata[0].shape) for each in (below, node))
        return len(before) == len(after) == 2 and before[1] == 1 < after[1] == before[0]
    return False


def _below(node: Any) -> Any:
    """Return the first function below a node that does more than to cut and to copy."""
    for below in _first_inputs(node):
        name = kind_of(below)
        if name not in CUT and not name.startswith(MARKS):
            return below
    return None


def _first_inputs(node: Any) -> Iterator[Any]:
    """Yield the functions below a node, each the first input of the one before."""
    for _ in range(DEEPEST):
        if node is None or not node.next_functions:
            return
        node = node.next_functions[0][0]
        yield node
