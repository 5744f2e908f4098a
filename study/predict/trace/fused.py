"""What fused losses keep: they overwrite the logits, or never hold all of them.

For tensors without values: no loss here is one.
"""

from contextlib import AbstractContextManager
from unittest import mock

import torch
from torch import nn
from transformers import PretrainedConfig

from study.core.errors import Stop
from study.core.models import step
from study.core.models.config import kind_of
from study.core.models.step import Batch, mask, next_tokens


class _InPlace(torch.autograd.Function):
    """Copies the logits, because the last one of each row is cut off, and overwrites the copy with their gradient."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits.clone())
        return logits.new_zeros(logits.shape[0])

    @staticmethod
    def backward(ctx, gradient):
        return torch.empty_like(ctx.saved_tensors[0])  # including the logits that were cut off


def in_place() -> AbstractContextManager:
    """Inside it, cross-entropy overwrites the logits."""
    return mock.patch.object(step, "cross_entropy", lambda logits, *_, **__: _InPlace.apply(logits))


class _Chunked(torch.autograd.Function):
    """The loss of Liger's kernel (arXiv 2410.10989): chunk by chunk, so that it never holds all logits.

    It computes both gradients already in the forward pass.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels):
        tokens, width = hidden.shape
        vocabulary = weight.shape[0]
        share = -(-tokens // -(-vocabulary // width))
        chunk = 1 << (share - 1).bit_length()
        of_hidden = torch.zeros_like(hidden)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        losses = hidden.new_zeros(tokens, dtype=torch.float32)
        for start in range(0, tokens, chunk):
            rows = hidden[start : start + chunk]
            logits = (rows @ weight.t()).float().softmax(-1).to(hidden.dtype)
            losses[start : start + chunk] = logits.gather(1, labels[start : start + chunk, None].clamp(min=0))[:, 0]
            of_hidden[start : start + chunk] = logits @ weight
            if of_weight is not None:
                of_weight.addmm_(logits.t(), rows)
        ctx.save_for_backward(of_hidden, of_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx, gradient):
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden, of_weight, None


def without_logits(config: PretrainedConfig, model, batch: Batch) -> torch.Tensor:
    """The mean loss, computed like Liger's kernel."""
    if kind_of(config) != "decoder":
        raise Stop(f"the loss of {config.model_type} cannot be computed in chunks", "leave out --loss chunked")
    head = model.get_output_embeddings()
    model.set_output_embeddings(nn.Identity())
    model.config.final_logit_softcapping = None  # the kernel does this
    hidden = model(input_ids=batch["input_ids"], attention_mask=mask(config, batch, head.weight.dtype)).logits
    labels = next_tokens(batch)
    weight = head.weight
    if torch.is_autocast_enabled("cpu"):
        hidden = hidden.bfloat16()
        weight = weight.bfloat16()
    return _Chunked.apply(hidden.flatten(0, 1), weight, labels.flatten())
