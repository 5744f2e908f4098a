"""Norms, adapters and losses as fused kernels keep them, and experts one after the other. For shapes alone.

The kernels are Unsloth's, which fms-acceleration has as well (876e2ed, `kernels/unsloth/rms_layernorm.py` and
`fused_ops/unsloth_lora/bnb/fast_lora.py`).
"""

import types

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from study.models.adapters import Adapted


class _Norm(torch.autograd.Function):
    """Keeps its input and a number for each token. The gradient of its output becomes that of its input, in place."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class _Adapter(torch.autograd.Function):
    """A frozen layer with its adapter: keeps its input with and without dropout, but no mask."""

    @staticmethod
    def forward(ctx, x, down, up, base, drops):
        result = base(x)
        dropped = functional.dropout(x) if drops else x
        result += functional.linear(functional.linear(dropped, down.to(x.dtype)), up.to(x.dtype))
        ctx.base = base
        ctx.save_for_backward(x, dropped, down, up)
        return result

    @staticmethod
    def backward(ctx, gradient):
        _, dropped, down, up = ctx.saved_tensors
        inner = gradient @ up.to(gradient.dtype)
        of_down = inner.flatten(0, -2).T @ dropped.flatten(0, -2)
        of_up = gradient.flatten(0, -2).T @ functional.linear(dropped, down.to(dropped.dtype)).flatten(0, -2)
        of_x = gradient @ torch.empty_like(ctx.base.weight, dtype=gradient.dtype)
        of_x += (dropped != 0) * (inner @ down.to(gradient.dtype))
        return of_x, of_down.to(down.dtype), of_up.to(up.dtype), None, None


def fuse(model: nn.Module, adapters: bool) -> None:
    """Let RMS norms be fused kernels, and adapters as well, if told."""

    def norm(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return _Norm.apply(x)

    def adapted(self: Adapted, x: torch.Tensor) -> torch.Tensor:
        return _Adapter.apply(x, self.down.weight, self.up.weight, self.base, self.drops)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            setattr(module, "forward", types.MethodType(norm, module))  # noqa: B010
        if adapters and isinstance(module, Adapted) and module.magnitude is None:
            setattr(module, "forward", types.MethodType(adapted, module))  # noqa: B010


def part_experts(model: nn.Module, quantized: bool) -> None:
    """Let experts compute one after the other, as in transformers 4, each with as many tokens.

    Each has three linear layers. Quantized ones return the type of their input (bitsandbytes' `Linear4bit`).
    """

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = functional.linear(x, weight)
        return out.to(x.dtype) if quantized else out

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        experts = self.gate_up_proj.shape[0]
        total = torch.zeros_like(hidden)
        for expert in range(experts):
            tokens = chosen.new_empty(chosen.numel() // experts, dtype=torch.long)
            x = hidden[tokens]
            gate, up = (product(x, weight) for weight in self.gate_up_proj[expert].chunk(2))
            out = product(self.act_fn(gate) * up, self.down_proj[expert]) * weights[tokens, :1]
            total.index_add_(0, tokens, out.to(total.dtype))
        return total

    for module in model.modules():
        if isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            setattr(module, "forward", types.MethodType(forward, module))  # noqa: B010


class _InPlace(torch.autograd.Function):
    """Copies the logits, because the last one of each row is cut off, and overwrites the copy with their gradient."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits.clone())
        return logits.new_zeros(logits.shape[0])

    @staticmethod
    def backward(ctx, gradient):
        return torch.empty_like(ctx.saved_tensors[0])  # including the logits that were cut off


class Cutting(TorchFunctionMode):
    """Inside it, cross-entropy reads a copy of the logits, because the last one of each row is cut off."""

    def __torch_function__(self, function, _, args=(), kwargs=None):
        if function is functional.cross_entropy:
            args = (args[0].clone(), *args[1:])
        return function(*args, **(kwargs or {}))


class InPlace(TorchFunctionMode):
    """Inside it, cross-entropy overwrites the logits. For shapes alone: the value is not a loss."""

    def __torch_function__(self, function, _, args=(), kwargs=None):
        if function is functional.cross_entropy:
            return _InPlace.apply(args[0])
        return function(*args, **(kwargs or {}))
