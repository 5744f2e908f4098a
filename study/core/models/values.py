"""Tensors that have shapes but no values: what reading one gives, and what PyTorch cannot do with them."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class WithoutValues(TorchDispatchMode):
    """Inside a FakeTensorMode: reading a value gives 0, and grouped products work in every dtype."""

    # A value of 0 means no overflow, no norm to clip, no row without a mask. Mixtures of experts use grouped products.
    # These have kernels for fp32, but PyTorch 2.13's own shape function only accepts bf16.

    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        if function is aten._local_scalar_dense.default:
            return 0.0 if args[0].is_floating_point() else 0
        if function is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return _grouped_product(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _grouped_flops(left, right, *_, out_val, **__) -> int:
    # Each row of the left is multiplied with one group of the right; of two matrices, each column with a row.
    products = left.shape[0] * right.shape[1] if left.dim() == right.dim() == 2 else out_val.numel()
    return 2 * products * left.shape[-1]


vars(_grouped_flops)["_get_raw"] = True  # FlopCounterMode's mark for a formula that takes tensors
GROUPED = {aten._grouped_mm: _grouped_flops}  # PyTorch 2.13's FlopCounterMode has no formula for it


def _grouped_product(left, right, offsets=None, bias=None, out_dtype=None) -> torch.Tensor:
    """Return the result's shape: one product for each group. Groups lie side by side, by rows or by columns."""
    shape = [left.shape[-2], right.shape[-1]]
    if left.dim() == right.dim() == 2:
        shape.insert(0, offsets.numel())
    elif left.dim() == right.dim() == 3:
        shape.insert(0, left.shape[0])
    return left.new_empty(shape, dtype=out_dtype or left.dtype)
