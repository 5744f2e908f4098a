"""Lets a model of transformers keep what litgpt's own model keeps (5895df10 of April 2024; litgpt/model.py, lora.py).

- Query, key and value are parts of one tensor, which stays whole.
- Keys and values are repeated for every head of the queries (a single value without a copy). The output of attention is
  copied.
- A norm keeps its input in fp32. Since July 2024 it also multiplies by its weight in fp32.
- GELU is one kernel.
- Adapters of query, key and value share what dropout makes. If some of the three have none, the output of the others is
  kept by the copy to its place (zero_pad).
- Fabric converts a model's outputs to fp32 (lightning 2.1 to 2.3, `convert_output` of each precision).
- Where adapters train, the head and the loss take 128 tokens of each row at a time (finetune/lora.py). Where all
  trains, the loss takes 128 tokens of all rows (finetune/full.py).
- Both scripts hold the logits of a pass until the next one has its own, and with them the first pass's graph. Old
  releases of bitsandbytes keep the inputs of products in the graph (`Quantizing`). The pass before is taken to be as
  long, which the longest rows need not be.
"""

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import cast
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import NewGELUActivation

from study.models.adapters import Adapted, Before
from study.models.step import Batch

JOINED = ("q_proj", "k_proj", "v_proj")
HEAD_TOKENS = 128  # lm_head_chunk_size
LOGITS = 0  # the key in Before of the logits of the pass before
FINETUNING = ("finetune", "finetune_longest_first")


def as_litgpt(model: nn.Module, before: Before | None = None) -> None:
    """Let norms, GELU and attention compute as litgpt's. Modules and their tensors keep their names.

    `before` collects what the loop still holds of the pass before. None: it holds nothing.
    """
    setattr(model, "before", before)  # noqa: B010
    for name, module in model.named_modules():
        if hasattr(module, "variance_epsilon"):
            setattr(module, "forward", types.MethodType(_norm, module))  # noqa: B010
        if isinstance(module, NewGELUActivation):
            setattr(module, "forward", functools.partial(functional.gelu, approximate="tanh"))  # noqa: B010
        if all(hasattr(module, part) for part in JOINED):
            _join([getattr(module, part) for part in JOINED])
        if name.endswith("query_key_value") and isinstance(module, Adapted):
            setattr(module, "forward", types.MethodType(_of_query_and_value, module))  # noqa: B010


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
            value = value.expand_as(query) if value.shape[1] == 1 else value.repeat_interleave(groups, dim=1)
            key = key.repeat_interleave(groups, dim=1)
        return fused(query, key, value, *args, **kwargs).contiguous()

    with mock.patch.object(functional, "scaled_dot_product_attention", attention):
        yield


def finetuning_loss(model: PreTrainedModel, batch: Batch, mask: torch.Tensor | None) -> tuple:
    """Return the loss, and the logits that the script holds."""
    before = cast(Before | None, model.before)
    ids = batch["input_ids"]
    if before is not None:
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        before[LOGITS] = torch.empty(*ids.shape, vocabulary, device=ids.device)
    adapted = any(isinstance(module, Adapted) for module in model.modules())
    outputs = _in_pieces(model, ids, mask) if adapted else [model(input_ids=ids, attention_mask=mask).logits]
    logits = [each.float() for each in outputs]
    del outputs
    if before is not None:
        before.clear()
    if adapted:
        logits[-1] = logits[-1][:, :-1]  # the last token predicts nothing
        return losses_in_pieces(logits, batch).mean(), logits
    pairs = zip(_of_tokens(logits[0][:, :-1]), _of_tokens(ids[:, 1:]), strict=True)
    return torch.cat([functional.cross_entropy(x, y, reduction="none") for x, y in pairs]).mean(), logits


def _of_tokens(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return values.flatten(0, 1).split(HEAD_TOKENS)


def _in_pieces(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the logits of the pieces of the rows."""
    head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head)
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, nn.Identity())
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap:
        model.config.final_logit_softcapping = None  # each piece is capped by itself
    hidden = model(input_ids=ids, attention_mask=mask).logits
    pieces = [head(piece) for piece in hidden.split(HEAD_TOKENS, dim=1)]
    if cap:
        pieces = [torch.tanh(piece / cap) * cap for piece in pieces]
    return pieces


def losses_in_pieces(pieces: list[torch.Tensor], batch: Batch) -> torch.Tensor:
    """Return the loss of each token."""
    labels = batch["input_ids"][:, 1:].split(HEAD_TOKENS, dim=1)
    pairs = zip(pieces, labels, strict=False)  # the last piece may be empty
    return torch.cat([functional.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="none") for x, y in pairs])


def _norm(self, x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.variance_epsilon)
    return normed.to(x.dtype) * self.weight


def _join(parts: list[nn.Module]) -> None:
    """Let the first of the parts compute all of them, and the others return what it has computed for them."""
    forwards = [part.forward for part in parts]
    waiting: list[torch.Tensor] = []

    def first(x: torch.Tensor) -> torch.Tensor:
        drops = any(isinstance(part, Adapted) and part.drops for part in parts)
        dropped = functional.dropout(x) if drops else x
        pads = not all(isinstance(part, Adapted) for part in parts)
        outputs = [_output(part, forward, x, dropped, pads) for part, forward in zip(parts, forwards, strict=True)]
        waiting[:] = torch.cat(outputs, -1).split([output.shape[-1] for output in outputs], -1)
        return waiting.pop(0)

    for part in parts:
        setattr(part, "forward", first if part is parts[0] else lambda _: waiting.pop(0))  # noqa: B010


def _output(part: nn.Module, forward, x: torch.Tensor, dropped: torch.Tensor, pads: bool) -> torch.Tensor:
    if not isinstance(part, Adapted):
        return forward(x)
    more = part.up(part.down(dropped))
    return part.base(x) + (_in_its_place(more, more.shape[-1]) if pads else more) * 2.0


def _of_query_and_value(self: Adapted, x: torch.Tensor) -> torch.Tensor:
    """Return the product of joined query, key and value, of which the key has no adapter: litgpt's default.

    The heads of the queries are together as wide as the input.
    """
    adapted = self.up.out_features - (self.up.out_features - self.down.in_features) // 2
    more = self.up(self.down(functional.dropout(x) if self.drops else x))[..., :adapted].contiguous()
    return self.base(x) + _in_its_place(more, self.up.out_features) * 2.0


def _in_its_place(more: torch.Tensor, width: int) -> torch.Tensor:
    places = torch.arange(more.shape[-1], device=more.device)
    return more.new_zeros(*more.shape[:-1], width).index_copy(-1, places, more)
