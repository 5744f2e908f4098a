"""DeepSpeed's stage 3 has a linear layer of its own, in the place of PyTorch's (zero/linear.py, version 0.19.8).

It keeps its input and its weight as they come. PyTorch's, under autocast, keeps the copies that it multiplied with.
"""

import contextlib
from collections.abc import Iterator

import torch


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias):
        ctx.save_for_backward(input, weight, bias)
        ctx.autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        if input.dim() == 2 and bias is not None:
            return torch.addmm(bias, input, weight.t())
        output = input.matmul(weight.t())
        if bias is not None:
            output += bias
        return output

    @staticmethod
    def backward(ctx, gradient):
        input, weight, bias = ctx.saved_tensors
        enabled, dtype = ctx.autocast
        of_input = of_weight = of_bias = None
        with torch.autocast("cpu", dtype, enabled=enabled):
            if ctx.needs_input_grad[0]:
                of_input = gradient.matmul(weight)
            if ctx.needs_input_grad[1]:
                flat = gradient.reshape(-1, gradient.shape[-1]) if gradient.dim() > 2 else gradient
                of_weight = flat.t().matmul(input.reshape(-1, input.shape[-1]) if input.dim() > 2 else input)
            if bias is not None and ctx.needs_input_grad[2]:
                of_bias = gradient.sum(list(range(gradient.dim() - 1)))
        return of_input, of_weight, of_bias


@contextlib.contextmanager
def linear_layers() -> Iterator[None]:
    """Within it linear layers are those of stage 3."""
    own = torch.nn.functional.linear
    torch.nn.functional.linear = lambda input, weight, bias=None: _Linear.apply(input, weight, bias)
    try:
        yield
    finally:
        torch.nn.functional.linear = own
