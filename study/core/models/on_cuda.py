"""What operations keep on CUDA, on a machine without a GPU.

PyTorch without CUDA refuses autograd on CUDA tensors, even if they have no memory. So the tensors claim to be on a CPU,
and operations whose CPU kernels differ are replaced by some that keep what CUDA's are documented to keep.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.nn import functional
from torch.overrides import TorchFunctionMode

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
    if query.dim() != 4:  # one head, or one of one row
        return functional.scaled_dot_product_attention(query, key, value, attn_mask, *_, **__)
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
    """Inside it, PyTorch's functions of tensors without values keep what CUDA's kernels keep."""

    def __init__(self, attention: str):
        super().__init__()
        # Routers of experts call softmax, too, but the traces that come with the package know only attention's.
        self.replaced = REPLACED | ({functional.softmax: _softmax} if attention == "eager" else {})

    def __torch_function__(self, function, _, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = next(iter([*args, *kwargs.values()]), None)
        if not isinstance(first, FakeTensor):
            return function(*args, **kwargs)
        # With a type of its own, such as softmax(dtype=...), an operation has been told what to compute in.
        in_fp32 = getattr(function, "__name__", "") in IN_FP32 and kwargs.get("dtype") is None
        if in_fp32 and torch.is_autocast_enabled("cpu"):
            args = tuple(each.float() if getattr(each, "dtype", None) is torch.bfloat16 else each for each in args)
        return self.replaced.get(function, function)(*args, **kwargs)
