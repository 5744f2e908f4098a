"""Adapters beside frozen linear layers, and frozen linear layers in few bits."""

import re
import types
from typing import cast

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

LINEAR = (nn.Linear, Conv1D)
IN_A_LAYER = re.compile(r"(.*\.)?\d+\.")  # the beginning of a module's name; the head is in no layer


class Adapted(nn.Module):
    """A frozen linear layer plus the product of two thin matrices that train."""

    like_peft = False  # as in PEFT 0.21: inputs are copied to the adapter's type, and its output is scaled
    quantized = False  # the frozen layer is bitsandbytes', for which PEFT has other adapters

    def __init__(self, base: nn.Linear | Conv1D, rank: int, dora: bool = False, drops: bool = False):
        super().__init__()
        self.drops = drops  # some of its inputs, as PEFT's lora_dropout does
        dtype = base.weight.dtype
        # Not the weight's shape: under ZeRO stage 3 a rank may hold none of it.
        inputs, outputs = (base.nx, base.nf) if isinstance(base, Conv1D) else (base.in_features, base.out_features)
        self.base = base
        self.down = nn.Linear(inputs, rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, outputs, bias=False, dtype=dtype)
        self.magnitude = nn.Parameter(torch.ones(outputs, dtype=dtype)) if dora else None
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        if not self.like_peft:
            return result + self.up(self.down(x))
        keeps_type = self.quantized and torch.is_autocast_enabled("cpu")
        x = x if keeps_type else x.to(self.down.weight.dtype)
        dropped = functional.dropout(x) if self.drops else x
        if self.magnitude is not None:
            more = self._with_magnitude(dropped, result)
        else:
            more = self.up(self.down(dropped)) * 2.0
        if self.quantized and not keeps_type:
            more = more.to(result.dtype)
        total = result + more
        return total if self.quantized else total.to(result.dtype)

    def _with_magnitude(self, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Return what DoRA adds (arXiv 2402.09353, 4.3): the norm of the whole weight is a constant.

        If inputs are dropped, the frozen layer's product is computed a second time, without them.
        """
        like = self.down.weight
        thin = self.up(self.down(torch.eye(like.shape[1], device=like.device, dtype=like.dtype))).T.to(x.dtype)
        base = self.base.weight.to(x.dtype, copy=self.quantized)
        oriented = base.T if isinstance(self.base, Conv1D) else base
        norm = torch.linalg.norm(oriented + 2.0 * thin.detach(), dim=1).detach()
        scale = (cast(torch.Tensor, self.magnitude) / norm).view(1, -1)
        lora = self.up(self.down(x))
        if self.drops:
            result = functional.linear(x, oriented)
        elif self.base.bias is not None:
            result = result - self.base.bias
        return (scale - 1) * result + scale * lora * 2.0


class _Product(torch.autograd.Function):
    """The product with a quantized weight, as in bitsandbytes: each pass makes the weight in 16 bits.

    Products with 8 bits (MatMul8bitLt) keep their input, as an attribute: recomputation does not drop it. Their columns
    with outliers, which are few, are left out.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, bits):
        ctx.weight = weight
        ctx.kept = x if ctx.needs_input_grad[0] and bits == 8 else None
        with torch.autocast("cpu", enabled=False):
            whole = weight.new_empty(weight.shape, dtype=x.dtype)
            return functional.linear(x, whole, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight.new_empty(ctx.weight.shape, dtype=gradient.dtype), None, None, None


def quantize(model: nn.Module, bits: int) -> None:
    """Let the frozen linear layers compute as bitsandbytes' do, except the head. Their weights keep their shapes."""

    def forward(self: nn.Linear | Conv1D, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.T if isinstance(self, Conv1D) else self.weight
        read = x.to(torch.bfloat16) if bits == 4 else x  # 4 bits: BitsAndBytesConfig's compute type
        return cast(torch.Tensor, _Product.apply(read, weight, self.bias, bits)).to(x.dtype)

    for name, module in model.named_modules():
        if isinstance(module, Adapted):
            module.quantized = True
        if isinstance(module, LINEAR) and IN_A_LAYER.match(name) and not module.weight.requires_grad:
            setattr(module, "forward", types.MethodType(forward, module))  # noqa: B010
