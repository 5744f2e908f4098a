"""Lets a model of transformers keep what litgpt's own model keeps (0.5.13; litgpt/model.py, litgpt/lora.py).

- Query, key and value are parts of one tensor, which stays whole.
- Keys and values are repeated for every head of the queries, and the output of attention is copied.
- A norm multiplies by its weight in fp32.
- Adapters of query, key and value share what dropout makes. Their output is kept by the copy to its place (zero_pad).
- Where adapters train, the head and the loss take 128 tokens of each row at a time (finetune/lora.py).
"""

import contextlib
import types
from collections.abc import Iterator
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from study.models.adapters import Adapted
from study.models.step import Batch

JOINED = ("q_proj", "k_proj", "v_proj")
HEAD_TOKENS = 128  # lm_head_chunk_size


def as_litgpt(model: nn.Module) -> None:
    """Let norms and attention compute as litgpt's. Modules and their tensors keep their names."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            setattr(module, "forward", types.MethodType(_norm, module))  # noqa: B010
        if all(hasattr(module, name) for name in JOINED):
            _join([getattr(module, name) for name in JOINED])


@contextlib.contextmanager
def litgpt_attention() -> Iterator[None]:
    """Inside it, fused attention reads and writes whole rows of one head after the other.

    litgpt joins what is rotated with what is not, so its queries lie so, and the kernel's output, too. The output
    projection reads a copy.
    """
    fused = functional.scaled_dot_product_attention

    def attention(query, key, value, *args, enable_gqa=False, **kwargs) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
        return fused(query, key, value, *args, **kwargs).contiguous()

    with mock.patch.object(functional, "scaled_dot_product_attention", attention):
        yield


def logits_in_pieces(model: PreTrainedModel, batch: Batch, mask: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the logits of the pieces of the rows. The last token predicts nothing."""
    head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head)
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, nn.Identity())
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap:
        model.config.final_logit_softcapping = None  # each piece is capped by itself
    hidden = model(input_ids=batch["input_ids"], attention_mask=mask).logits
    pieces = [head(piece) for piece in hidden.split(HEAD_TOKENS, dim=1)]
    if cap:
        pieces = [torch.tanh(piece / cap) * cap for piece in pieces]
    return [*pieces[:-1], pieces[-1][:, :-1]]


def losses_in_pieces(pieces: list[torch.Tensor], batch: Batch) -> torch.Tensor:
    """Return the loss of each token."""
    labels = batch["input_ids"][:, 1:].split(HEAD_TOKENS, dim=1)
    pairs = zip(pieces, labels, strict=False)  # the last piece may be empty
    return torch.cat([functional.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="none") for x, y in pairs])


def _norm(self, x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.variance_epsilon)
    return (normed * self.weight.float()).to(x.dtype)


def _join(parts: list[nn.Module]) -> None:
    """Let the first of the parts compute all of them, and the others return what it has computed for them."""
    forwards = [part.forward for part in parts]
    waiting: list[torch.Tensor] = []

    def first(x: torch.Tensor) -> torch.Tensor:
        drops = any(isinstance(part, Adapted) and part.drops for part in parts)
        dropped = functional.dropout(x) if drops else x
        outputs = [_output(part, forward, x, dropped) for part, forward in zip(parts, forwards, strict=True)]
        waiting[:] = torch.cat(outputs, -1).split([output.shape[-1] for output in outputs], -1)
        return waiting.pop(0)

    for part in parts:
        setattr(part, "forward", first if part is parts[0] else lambda _: waiting.pop(0))  # noqa: B010


def _output(part: nn.Module, forward, x: torch.Tensor, dropped: torch.Tensor) -> torch.Tensor:
    if not isinstance(part, Adapted):
        return forward(x)
    more = part.up(part.down(dropped))
    places = torch.arange(more.shape[-1], device=x.device)
    return part.base(x) + torch.zeros_like(more).index_copy(-1, places, more) * 2.0
