"""What operations keep on CUDA, in stage 3 and in fused losses, on a machine without a GPU.

PyTorch without CUDA refuses autograd on CUDA tensors, even if they have no memory. So the tensors claim to be on a CPU,
and operations whose CPU kernels differ are replaced by some that keep what CUDA's are documented to keep.
"""

from contextlib import AbstractContextManager
from math import ceil
from unittest import mock

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig

from study.core.errors import Stop
from study.core.models import step
from study.core.models.step import Batch, mask, next_tokens

# What CUDA's autocast computes in fp32, and a CPU's in the type of its input (PyTorch's documentation of torch.amp).
IN_FP32 = (
    "layer_norm", "group_norm", "softmax", "log_softmax", "pow", "__pow__", "__rpow__", "rsqrt", "exp", "log", "norm",
    "sum", "prod", "cumsum", "cumprod", "reciprocal", "softplus", "nll_loss", "cross_entropy", "mse_loss", "l1_loss",
)  # fmt: skip


# Two operations with shapes and no values. The first returns the output, and the logarithm of the sum of each row of
# scores; the second the three gradients (keys and values for every head of the queries), and what the kernel needs.
torch.library.define("study::fused_attention", "(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor)")
torch.library.define(
    "study::fused_attention_backward",
    "(Tensor gradient, Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@torch.library.register_fake("study::fused_attention")
def _(query, key, value):
    rows, heads, length, _ = query.shape
    # Written as rows, positions, heads, width, so that joining the heads copies nothing.
    out = query.new_empty(rows, length, heads, value.shape[-1]).transpose(1, 2)
    return out, query.new_empty(rows, heads, length, dtype=torch.float32)


@torch.library.register_fake("study::fused_attention_backward")
def _(gradient, query, key, value):
    rows, heads, length, _ = query.shape
    of_all = [each.new_empty(rows, each.shape[2], heads, each.shape[3]).transpose(1, 2) for each in (query, key, value)]
    sums = query.new_empty(rows, heads, length, dtype=torch.float32)
    return *of_all, sums, query.new_empty(query.shape, dtype=torch.float32)


class _Attention(Function):
    """Keeps its inputs, its output and a number for each row of scores, but no scores."""

    @staticmethod
    def forward(ctx, query, key, value, bias):
        out, sums = torch.ops.study.fused_attention(query, key, value)
        ctx.save_for_backward(query, key, value, out, sums, *([] if bias is None else [bias]))
        return out

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, _, _, *bias = ctx.saved_tensors
        of_query, *wide = torch.ops.study.fused_attention_backward(gradient, query, key, value)[:3]
        if query.shape[1] > key.shape[1]:  # the gradients of shared heads are summed
            wide = [each.unflatten(1, (key.shape[1], -1)).sum(2) for each in wide]
        of_bias = None
        if ctx.needs_input_grad[3]:
            # T5's positions, summed over the rows and heads that share them. The kernel writes them for all scores.
            of_bias = query.new_empty(*query.shape[:3], key.shape[2]).sum_to_size(bias[0].shape)
        return of_query, *wide, of_bias


class _Softmax(Function):
    """CUDA's softmax: its backward pass first makes the product of gradient and output (SoftMax.cu of PyTorch 2.13)."""

    @staticmethod
    def forward(ctx, values, dim):
        out = torch.softmax(values, dim)
        ctx.save_for_backward(out)
        ctx.dim = dim
        return out

    @staticmethod
    def backward(ctx, gradient):
        (out,) = ctx.saved_tensors
        product = torch.empty_like(gradient)  # no kernel: constants of times were fitted to traces without one
        return torch._softmax_backward_data(product, out, ctx.dim, out.dtype), None


def _softmax(values, dim=None, _stacklevel=3, dtype=None):
    return _Softmax.apply(values if dtype is None else values.to(dtype), dim)


def _attention(query, key, value, attn_mask=None, *_, **__):
    """PyTorch's scaled_dot_product_attention. Dropout, the scale and causality change no size."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (each.bfloat16() for each in (query, key, value))
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.to(query.dtype)
    elif attn_mask is not None:
        # A mask of truth values is converted to numbers in each call, for every row of the batch.
        shape = [*attn_mask.shape]
        if len(shape) == 4:
            shape[0] = query.shape[0]
        attn_mask = query.new_empty(shape)
    return _Attention.apply(query, key, value, attn_mask)


def _dropout(input, p=0.5, training=True, inplace=False):
    """CUDA keeps a mask of one byte for each element; a CPU one of the input's type."""
    return torch.native_dropout(input, p, True)[0] if training and p else input


REPLACED = {functional.scaled_dot_product_attention: _attention, functional.dropout: _dropout, torch.dropout: _dropout}


class AsOnCuda(TorchFunctionMode):
    """Inside it, PyTorch's functions keep what CUDA's kernels keep."""

    def __init__(self, attention: str):
        super().__init__()
        # Routers of experts call softmax, too, but the traces that come with the package know only attention's.
        self.replaced = REPLACED | ({functional.softmax: _softmax} if attention == "eager" else {})

    def __torch_function__(self, function, _, args=(), kwargs=None):
        kwargs = kwargs or {}
        # With a type of its own, such as softmax(dtype=...), an operation has been told what to compute in.
        in_fp32 = getattr(function, "__name__", "") in IN_FP32 and kwargs.get("dtype") is None
        if in_fp32 and torch.is_autocast_enabled("cpu"):
            args = tuple(each.float() if getattr(each, "dtype", None) is torch.bfloat16 else each for each in args)
        return self.replaced.get(function, function)(*args, **kwargs)


class _InPlace(Function):
    """Copies the logits, because the last one of each row is cut off, and overwrites the copy with their gradient."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits.clone())
        return logits.new_zeros(logits.shape[0])

    @staticmethod
    def backward(ctx, gradient):
        return torch.empty_like(ctx.saved_tensors[0])  # including the logits that were cut off


def in_place() -> AbstractContextManager:
    """Let the loss overwrite its logits, as fused kernels of it do."""
    return mock.patch.object(step, "cross_entropy", lambda logits, *_, **__: _InPlace.apply(logits))


class _Chunked(Function):
    """The loss of Liger's kernel (arXiv 2410.10989): chunk by chunk, with both gradients in the forward pass."""

    @staticmethod
    def forward(ctx, hidden, weight, labels):
        tokens, width = hidden.shape
        vocabulary = weight.shape[0]
        # Liger's size of a chunk: its logits have about as many elements as the hidden states, in a power of two.
        chunk = 1 << (ceil(tokens / ceil(vocabulary / width)) - 1).bit_length()
        of_hidden = torch.zeros_like(hidden)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        losses = hidden.new_zeros(tokens, dtype=torch.float32)
        for start in range(0, tokens, chunk):
            part = slice(start, start + chunk)
            rows = hidden[part]
            logits = (rows @ weight.t()).float().softmax(-1).to(hidden.dtype)
            losses[part] = logits.gather(1, labels[part, None].clamp(min=0))[:, 0]
            of_hidden[part] = logits @ weight
            if of_weight is not None:
                of_weight.addmm_(logits.t(), rows)
        ctx.save_for_backward(of_hidden, of_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx, gradient):
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden, of_weight, None


def without_logits(config: PretrainedConfig, model, batch: Batch) -> torch.Tensor:
    if model.get_output_embeddings() is None:
        raise Stop("a chunked loss is of logits over a vocabulary, and this model has none", "leave it out")
    weight = model.get_output_embeddings().weight
    model.set_output_embeddings(nn.Identity())
    model.config.final_logit_softcapping = None  # the kernel does this
    hidden = model(input_ids=batch["input_ids"], attention_mask=mask(config, batch, weight.dtype)).logits
    if torch.is_autocast_enabled("cpu"):
        hidden = hidden.bfloat16()
        weight = weight.bfloat16()
    return _Chunked.apply(hidden.flatten(0, 1), weight, next_tokens(batch).flatten())


# --- linear layers of DeepSpeed's stage 3 (runtime/zero/linear.py of 0.19.8). They keep the original input and the
# weight itself, so that under autocast no copies of lower precision stay.


class _Linear(Function):
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
        # As LinearFunctionForZeroStage3.backward: under the autocast of the forward pass, whatever surrounds
        # backward().
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
    """Let linear layers compute as stage 3's own."""
    return mock.patch.object(functional, "linear", lambda x, weight, bias=None: _Linear.apply(x, weight, bias))
