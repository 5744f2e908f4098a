"""Tensors with shapes and no values: what still works without values, where PyTorch itself refuses."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class WithoutValues(TorchDispatchMode):
    """Inside a FakeTensorMode: values that are read are 0, and grouped products work in every dtype.

    A read of 0 means no overflow, no norm to clip, no row without a mask. Grouped products, of which mixtures of
    experts are made, have kernels for fp32, but PyTorch 2.13's own shape function takes bf16 alone.
    """

    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        if function is aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return 0.0 if dtype.is_floating_point else False if dtype == torch.bool else 0
        if function is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return _grouped_product(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _grouped_flops(left, right, *_, out_val=None, **__) -> int:
    """Each row of the left is multiplied with one group of the right; of two flat ones, each column with a row."""
    return 2 * left.shape[0] * left.shape[1] * right.shape[-1]


_grouped_flops._get_raw = True  # FlopCounterMode's mark for a formula that takes tensors
GROUPED = {aten._grouped_mm: _grouped_flops}  # PyTorch 2.13's FlopCounterMode has no formula for it


def _grouped_product(left, right, offsets=None, bias=None, out_dtype=None) -> torch.Tensor:
    """The result's shape: of one product for each group, whose rows or whose columns lie side by side."""
    if left.dim() == right.dim() == 2:
        shape = (offsets.numel(), left.shape[0], right.shape[1])
    elif left.dim() == 3 and right.dim() == 3:
        shape = (left.shape[0], left.shape[1], right.shape[2])
    else:
        shape = (left.shape[-2], right.shape[-1])
    return left.new_empty(shape, dtype=out_dtype or left.dtype)
