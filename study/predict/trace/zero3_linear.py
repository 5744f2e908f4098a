"""Linear layers as DeepSpeed's stage 3 computes them, with its own function instead of PyTorch's.

See runtime/zero/linear.py of 0.19.8; it is on unless `memory_efficient_linear` is false. It keeps the original input
and the weight itself, so that under autocast no copies of lower precision stay.
"""

from contextlib import AbstractContextManager
from unittest import mock

import torch
from torch.nn import functional


class _Linear(torch.autograd.Function):
    """Keeps its inputs as they are, and computes both ways under the autocast of the forward pass."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.enabled = torch.is_autocast_enabled("cpu")
        if x.dim() == 2 and bias is not None:
            return torch.addmm(bias, x, weight.t())
        out = x.matmul(weight.t())
        if bias is not None:
            out += bias
        return out

    @staticmethod
    def backward(ctx, gradient):
        of_x = of_weight = of_bias = None
        with torch.autocast("cpu", torch.bfloat16, enabled=ctx.enabled):
            x, weight = ctx.saved_tensors
            rows = gradient.reshape(-1, gradient.shape[-1])
            if ctx.needs_input_grad[0]:
                of_x = gradient.matmul(weight)
            if ctx.needs_input_grad[1]:
                of_weight = rows.t().matmul(x.reshape(-1, x.shape[-1]))
            if ctx.needs_input_grad[2]:
                of_bias = rows.sum(0)
        return of_x, of_weight, of_bias


def zero3_linear() -> AbstractContextManager:
    """Inside it, linear layers are those of stage 3."""
    return mock.patch.object(functional, "linear", lambda x, weight, bias=None: _Linear.apply(x, weight, bias))
