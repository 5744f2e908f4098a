"""What fused losses and linear layers of stage 3 keep, on a machine without a GPU."""

from contextlib import AbstractContextManager
from unittest import mock

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional
from transformers import PretrainedConfig

from study.core.errors import Stop
from study.core.models import step
from study.core.models.step import Batch, mask, next_tokens
from study.predict.trace.pieces import chunk_tokens


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
        chunk = chunk_tokens(tokens, vocabulary, width)
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
