"""Bytes that an optimizer keeps as moments, and bytes that it makes during an update.

DDP and one process give an optimizer each tensor as it is, FSDP2 a rank's rows of each tensor, and DeepSpeed's ZeRO one
flat vector of all. Optimizers that work by matrices or by blocks keep another number of bytes for a vector.
"""

from collections.abc import Sequence
from math import ceil, prod

from study.predict.memory.profile import Tensor

# What DeepSpeed leaves to AdamW, by name, so Muon gets GPT-2's `wte` (deepspeed/__init__.py, set_optimizer_flags).
NOT_FOR_MUON = ("embed", "lm_head")
LEAST_8BIT_ELEMENTS = 4096  # bitsandbytes 0.50: smaller tensors keep fp32 (optim/optimizer.py, min_8bit_size)
BLOCK_ELEMENTS = 256  # with one fp32 scale for each block of a moment
QUANTILES_BYTES = 2 * 256 * 4  # the values that 8 bits stand for: a table for each moment, shared by all tensors


def held_bytes(optimizer: str, tensors: Sequence[Tensor], state_bytes: int) -> int:
    """Bytes of all moments. `state_bytes` are those of an element, unless the optimizer keeps 8 bits."""
    if optimizer != "adamw_8bit":
        return state_bytes * sum(_elements(optimizer, each) for each in tensors)
    large = [each.elements for each in tensors if each.elements >= LEAST_8BIT_ELEMENTS]
    small = sum(each.elements for each in tensors) - sum(large)
    scaled = sum(elements + 4 * ceil(elements / BLOCK_ELEMENTS) for elements in large)
    return 2 * (4 * small + scaled) + (QUANTILES_BYTES if large else 0)


def _elements(optimizer: str, each: Tensor) -> int:
    if optimizer == "sgd":
        return each.elements
    if optimizer == "muon" and len(each.shape) >= 2 and not any(word in each.name.lower() for word in NOT_FOR_MUON):
        return each.elements
    if optimizer == "adafactor":  # torch 2.13: a row and a column of each matrix, and all of a vector
        rows = each.shape[:-1]
        return prod(rows) + each.elements // rows[-1] if rows else each.elements
    return 2 * each.elements


def made_bytes(optimizer: str, tensors: Sequence[Tensor], state_bytes: int) -> int:
    """The most bytes that an update makes beside weights, gradients and moments, one tensor at a time.

    Memory inside bitsandbytes' operator for CPUs is not counted: records do not see it, and the kernel for GPUs needs
    none.
    """
    if optimizer == "foreach":
        return state_bytes * sum(each.elements for each in tensors)
    if optimizer == "single_tensor":  # the root of a second moment
        return state_bytes * max((each.elements for each in tensors), default=0)
    if optimizer == "adafactor":  # the estimate of the second moments; for a vector its squares as well
        return state_bytes * max((each.elements * (1 if len(each.shape) > 1 else 2) for each in tensors), default=0)
    return 0
