"""Builds the model of a config, with values or with shapes alone, and chooses the part of it that trains."""

import copy
import functools
import re
import types
from collections.abc import Callable, Collection
from typing import cast

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import local_torch_dtype
from transformers.pytorch_utils import Conv1D

from study.core.errors import Stop, nearest
from study.core.models.config import class_for


def build(config: PretrainedConfig, device: torch.device | str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a model in training mode with new random weights, on `meta` with shapes but no values."""
    # The config is copied, because building changes it.
    with torch.device(device), local_torch_dtype(dtype):
        return class_for(config)(copy.deepcopy(config)).train()


HEAD = re.compile(r"^(classifier|score)\.")  # transformers' names of heads with new random weights, which have to train


def freeze(
    model: PreTrainedModel,
    lora_rank: int | None = None,
    train_only: str | None = None,
    lora_targets: Collection[str] = (),
    dora: bool = False,
    drops: bool = False,
) -> None:
    """Freeze a model, except tensors with matching names, or a classifier and adapters at layers with these names."""
    if lora_rank is None and train_only is None:
        return
    model.requires_grad_(False)
    if lora_rank is not None:
        _train(model, HEAD)  # which has nothing to keep
        _add_adapters(model, lora_targets, functools.partial(Adapted, rank=lora_rank, dora=dora, drops=drops))
    if train_only is not None:
        try:
            _train(model, re.compile(train_only))
        except re.error as error:
            raise Stop(f"train_only {train_only!r} is no regular expression ({error})", "correct it") from None
    if not any(tensor.requires_grad for tensor in model.parameters()):
        raise Stop(f"no tensor of the model matches train_only {train_only}", "give a part of a tensor's name")
    # Checkpointed layers need an input with a gradient, and frozen embeddings give none.
    model.enable_input_require_grads()


def _train(model: PreTrainedModel, names: re.Pattern) -> None:
    for name, tensor in model.named_parameters():
        if names.search(name):
            tensor.requires_grad_(True)


def _add_adapters(model: PreTrainedModel, targets: Collection[str], adapted: Callable) -> None:
    head = model.get_output_embeddings()
    known = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, LINEAR)}
    for name in targets:
        if name not in known:
            raise Stop(f"the model has no linear layer {name:.80}", nearest(name, sorted(known)))
    # Lists, because the modules are exchanged on the way.
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            wanted = child is not head
            if targets:
                wanted = name in targets
            if wanted and isinstance(child, LINEAR) and not child.weight.requires_grad:
                setattr(module, name, adapted(child))


# --- Adapters beside frozen linear layers, and frozen linear layers in few bits

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
        nn.init.zeros_(self.up.weight)  # so that at first nothing is added (arXiv 2106.09685, 4.1)

    @property
    def weight(self) -> torch.Tensor:
        """The frozen weight, whose type T5 looks at. PEFT's layers have it as well."""
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        if not self.like_peft:
            return result + self.up(self.down(x))
        keeps_type = self.quantized and torch.is_autocast_enabled("cpu")
        if not keeps_type:
            x = x.to(self.down.weight.dtype)
        if self.drops:
            x = functional.dropout(x)
        # The scale is PEFT's lora_alpha / rank. Any constant takes as much memory and time.
        more = self.up(self.down(x)) * 2.0 if self.magnitude is None else self._with_magnitude(x, result)
        if not self.quantized:
            return (result + more).to(result.dtype)
        # PEFT 0.21 (tuners/lora/bnb.py) converts what it adds, and not the sum.
        return result + (more if keeps_type else more.to(result.dtype))

    def _with_magnitude(self, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Return what DoRA adds (arXiv 2402.09353, 4.3): the norm of the whole weight is a constant."""
        # As PEFT does it: the product of the two matrices, by sending the identity through both.
        like = self.down.weight
        thin = self.up(self.down(torch.eye(like.shape[1], device=like.device, dtype=like.dtype))).T.to(x.dtype)
        base = self.base.weight.to(x.dtype, copy=self.quantized)
        oriented = base.T if isinstance(self.base, Conv1D) else base
        norm = torch.linalg.norm(oriented + 2.0 * thin.detach(), dim=1).detach()
        scale = (cast(torch.Tensor, self.magnitude) / norm).view(1, -1)
        lora = self.up(self.down(x))
        # The bias is not scaled, so it must not be in what is multiplied. Dropped inputs need another product.
        if self.drops:
            result = functional.linear(x, oriented)
        elif self.base.bias is not None:
            result = result - self.base.bias
        return (scale - 1) * result + scale * lora * 2.0


class _Product(torch.autograd.Function):
    """The product with a quantized weight, as in bitsandbytes: each pass makes the weight in 16 bits."""

    # Products with 8 bits (MatMul8bitLt) keep their input, as an attribute: recomputation does not drop it. Their few
    # columns with outliers are left out.

    @staticmethod
    def forward(ctx, x, weight, bias, bits):
        ctx.weight = weight
        if ctx.needs_input_grad[0] and bits == 8:
            ctx.kept = x
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
