"""Bytes that an optimizer keeps as moments, and bytes that it makes during an update.

DDP and one process give an optimizer each tensor as it is, FSDP2 a rank's rows of each tensor, and DeepSpeed's ZeRO one
flat vector of all. Optimizers that work by matrices or by blocks keep another number of bytes for a vector.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from study.predict.memory.profile import Tensor

NOT_FOR_MUON = ("embed", "lm_head")  # deepspeed/__init__.py, set_optimizer_flags: by name, so Muon gets GPT-2's `wte`
LEAST_8BIT_ELEMENTS = 4096  # bitsandbytes 0.50: smaller tensors keep fp32 (optim/optimizer.py, min_8bit_size)
BLOCK_ELEMENTS = 256  # with one fp32 scale for each block of a moment
QUANTILES_BYTES = 2 * 256 * 4  # the values that 8 bits stand for: a table for each moment, shared by all tensors


@dataclass(frozen=True)
class Piece:
    """A tensor as the optimizer sees it."""

    shape: tuple[int, ...]
    of_muon: bool = False

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def in_8_bits(self) -> bool:
        return self.elements >= LEAST_8BIT_ELEMENTS


def is_for_muon(tensor: Tensor) -> bool:
    """Return whether DeepSpeed lets Muon update a tensor."""
    return len(tensor.shape) >= 2 and not any(word in tensor.name.lower() for word in NOT_FOR_MUON)


def piece(tensor: Tensor, shape: tuple[int, ...] | None = None) -> Piece:
    return Piece(shape or tensor.shape, is_for_muon(tensor))


def held_bytes(optimizer: str, pieces: Sequence[Piece], state_bytes: int) -> int:
    """Bytes of all moments. `state_bytes` are those of an element, unless the optimizer keeps 8 bits."""
    if optimizer == "adamw_8bit":
        tables = QUANTILES_BYTES if any(each.in_8_bits for each in pieces) else 0
        return sum(map(_of_8_bits, pieces)) + tables
    return state_bytes * sum(_elements(optimizer, each) for each in pieces)


def _of_8_bits(each: Piece) -> int:
    if not each.in_8_bits:
        return 2 * 4 * each.elements
    return 2 * (each.elements + 4 * ceil(each.elements / BLOCK_ELEMENTS))


def _elements(optimizer: str, each: Piece) -> int:
    if optimizer == "sgd":
        return each.elements
    if optimizer == "muon":
        return each.elements * (1 if each.of_muon else 2)
    if optimizer == "adafactor":  # torch 2.13: a row and a column of each matrix, and all of a vector
        rows = each.shape[:-1]
        return prod(rows) + each.elements // rows[-1] if rows else each.elements
    return 2 * each.elements


def made_bytes(optimizer: str, pieces: Sequence[Piece], state_bytes: int) -> int:
    """The most bytes that an update makes beside weights, gradients and moments, one tensor at a time.

    Memory inside bitsandbytes' operator for CPUs is not counted: records do not see it, and the kernel for GPUs needs
    none.
    """
    if optimizer == "foreach":
        return state_bytes * sum(each.elements for each in pieces)
    if optimizer == "single_tensor":  # the root of a second moment
        return state_bytes * max((each.elements for each in pieces), default=0)
    if optimizer == "adafactor":  # the estimate of the second moments; for a vector its squares as well
        return state_bytes * max((each.elements * (1 if len(each.shape) > 1 else 2) for each in pieces), default=0)
    return 0
