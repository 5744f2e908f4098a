"""Bytes that optimizers keep of each parameter, and make in an update."""

import re
from collections.abc import Sequence
from math import ceil
from typing import Literal

from study.predict.trace.tape import Tensor

Optimizer = Literal["adamw", "foreach", "single_tensor", "adamw_8bit", "sgd", "adafactor", "muon"]
# What DeepSpeed leaves to AdamW, by name, so Muon gets GPT-2's `wte` (deepspeed/__init__.py, set_optimizer_flags).
NOT_FOR_MUON = re.compile("embed|lm_head", re.IGNORECASE)
MOMENTS = {"sgd": 1, "adafactor": 1}  # of a vector; 2 of others
LEAST_8BIT_ELEMENTS = 4096  # bitsandbytes 0.50: smaller tensors keep fp32 (optim/optimizer.py, min_8bit_size)
BLOCK_ELEMENTS = 256  # with one fp32 scale for each block of a moment
QUANTILES_BYTES = 2 * 256 * 4  # the values that 8 bits stand for: a table for each moment, shared by all tensors


def moments_bytes(optimizer: str, tensors: Sequence[Tensor], element_bytes: int) -> int:
    """Bytes of all moments of tensors as the optimizer has them, unless it keeps 8 bits."""
    # DDP gives it each tensor, FSDP2 a rank's rows of each, and ZeRO one flat vector, which has no rows.
    if optimizer != "adamw_8bit":
        return element_bytes * sum(_moment_elements(optimizer, tensor) for tensor in tensors)
    sizes = [tensor.elements for tensor in tensors]
    # Two moments: of small tensors 4 bytes an element; of others 1, and 4 for each block.
    large = [size for size in sizes if size >= LEAST_8BIT_ELEMENTS]
    held = 2 * 4 * (sum(sizes) - sum(large)) + 2 * sum(size + 4 * ceil(size / BLOCK_ELEMENTS) for size in large)
    return held + QUANTILES_BYTES if large else held


def _moment_elements(optimizer: str, tensor: Tensor) -> int:
    if tensor.is_matrix:
        if optimizer == "adafactor":  # torch 2.13: a row and a column of each matrix, and all of a vector
            return tensor.elements // tensor.shape[-1] + tensor.elements // tensor.shape[-2]
        if optimizer == "muon" and not NOT_FOR_MUON.search(tensor.name):
            return tensor.elements
    return MOMENTS.get(optimizer, 2) * tensor.elements


def update_makes_bytes(optimizer: str, tensors: Sequence[Tensor], element_bytes: int) -> int:
    """The most bytes that an update makes beside weights, gradients and moments."""
    if optimizer == "foreach":
        # torch._foreach_sqrt of all second moments is a new list (torch/optim/adam.py, _multi_tensor_adam).
        return element_bytes * sum(tensor.elements for tensor in tensors)
    # Others work at one tensor at a time. They make the root of a second moment; or Adafactor's estimate of the
    # second moments, for a vector its squares as well.
    if optimizer not in ("single_tensor", "adafactor"):
        return 0
    of_vectors = 2 if optimizer == "adafactor" else 1
    made = [tensor.elements * (1 if tensor.is_matrix else of_vectors) for tensor in tensors]
    return element_bytes * max(made, default=0)
