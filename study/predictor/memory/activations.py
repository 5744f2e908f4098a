"""Bytes that a forward pass keeps for the backward pass, and that the backward pass needs in addition.

The formulas follow transformers' modules and PyTorch's saved tensors, operation by operation: the counts below are
tensors of tokens x width. Tests compare them with what real models keep, at several sizes. On a CPU they are exact. The
differences on a GPU (masks of one byte, attention that is always fused) are from PyTorch's documentation, not measured.
"""

import functools
from collections import Counter
from dataclasses import dataclass, replace

from study.predictor.architecture import matrix_elements, tensors
from study.predictor.memory.profile import Gradient, Held, Profile
from study.predictor.setup import Setup

WRITTEN_OUT = ("gpt2", "gptj")  # families whose gelu is transformers' NewGELUActivation: no kernel of its own
FP32 = 4


@dataclass(frozen=True)
class Activations:
    """Bytes kept by the parts of a model, and the most that the backward pass of a part needs in addition."""

    embeddings: int
    layer: int
    layers: int
    head: int
    recomputed: int  # what a checkpointed layer keeps while it is run again; 0 without checkpointing
    loss_temporaries: int  # when the gradient of the logits is computed
    layer_temporaries: int
    gradient_of_logits: int  # in the dtype of products, during the backward pass of the head's product
    logits: int  # the logits' share of what the head keeps, freed once their gradient exists

    @property
    def kept(self) -> int:
        return self.embeddings + self.layers * self.layer + self.head


def activations(setup: Setup) -> Activations:
    """What a microbatch keeps and needs: BERT classifies its rows, every other family predicts each next token."""
    m, tokens = setup.model, setup.tokens
    layer = _layer(setup)
    embeddings, head, logits = _ends(setup)
    per_layer = layer
    if setup.checkpointing:  # only the input of each layer stays, and the mask that all layers share
        per_layer = tokens * m.hidden * setup.weight_bytes
        if setup.attention == "eager":
            embeddings += setup.sequence**2 * setup.weight_bytes * (setup.micro_batch if m.family == "bert" else 1)
    feed = {"bert": 1, "gpt_neox": 1}.get(m.family, 2)  # gelu written out has more steps, and a gate is one more
    extra = feed * tokens * m.inner * (FP32 if _gelu_in_fp32(setup) else setup.product_bytes)
    if m.family == "bert" and not setup.autocast and not setup.checkpointing:
        extra -= (
            tokens * m.hidden * setup.weight_bytes
        )  # the last layer ends by freeing three such tensors and allocating two
    elif m.family != "bert":
        extra += tokens * m.hidden * setup.weight_bytes
    gradient = 0 if m.family == "bert" else _logit_bytes(setup) * tokens * m.vocabulary
    return Activations(
        embeddings=embeddings,
        layer=per_layer,
        layers=m.layers,
        head=head,
        recomputed=layer if setup.checkpointing else 0,
        loss_temporaries=2 * gradient,  # of the negative log-likelihood, then of the log-softmax
        layer_temporaries=extra,
        gradient_of_logits=gradient * setup.product_bytes // _logit_bytes(setup),
        logits=logits,
    )


def profile(setup: Setup) -> Profile:
    """The activations of a microbatch. They do not depend on the arm or the ranks, so one answer serves all."""
    alone = {"deepspeed": None, "ranks": 1, "group": None, "accumulation": 1, "data_bytes": 0}
    return _profile(replace(setup, sequence=setup.row_tokens, sequence_ranks=1, **alone))


@functools.cache
def _profile(setup: Setup) -> Profile:
    """The activations from moment to moment. A block frees them in proportion to the elements whose gradient is done.

    If the head's matrix is also the embedding, its gradient waits for the embedding's gradient, and both for their sum.
    """
    a, rows = activations(setup), tensors(setup.model)
    tied = rows[0] if setup.model.tied and setup.model.family != "bert" else None
    waits = tied.elements * setup.weight_bytes if tied else 0
    starts = [Held(a.kept, a.loss_temporaries), Held(a.kept - a.logits, a.gradient_of_logits + waits)]
    sizes, done, gradients = Counter(), Counter(), []
    for tensor in rows:
        sizes[tensor.block] += tensor.elements
    left = {"head": a.kept - a.logits, "embeddings": a.embeddings}
    left |= {f"layer.{i}": a.embeddings + (i + 1) * a.layer for i in range(a.layers)}
    freed = {"head": 0, "embeddings": 0}  # by the backward pass of a block
    in_use = {"head": 0 if tied else a.gradient_of_logits, "embeddings": 0}
    for tensor in reversed(rows):
        block = tensor.block
        share = done[block] / sizes[block]
        kept = left[block] - freed.get(block, a.recomputed or a.layer) * share
        if a.recomputed and block.startswith("layer"):
            kept += a.recomputed
        needed = int(in_use.get(block, a.layer_temporaries))
        waiting, sum_of_two = (0, 2 * waits) if tensor == tied else (waits, waits)
        gradients.append(Gradient(tensor, Held(kept, needed + sum_of_two), Held(kept, needed + waiting)))
        done[block] += tensor.elements
    at_use = {"head": a.kept} | left
    return Profile(
        kept=a.kept,
        most=max(starts[: 2 if tied else 1], key=lambda held: held.total),
        at_use={tensor.name: at_use[tensor.block] if tensor.block != "head" else a.kept for tensor in rows},
        gradients=tuple(gradients),
    )


def _gelu_in_fp32(setup: Setup) -> bool:
    """Whether a written-out gelu computes its cube in fp32: under autocast, a GPU does and a CPU does not."""
    return setup.model.family in WRITTEN_OUT and setup.autocast and setup.on_gpu


def _mask_bytes(setup: Setup, value_bytes: int) -> int:
    """Bytes of an element of a dropout mask: a bool on a GPU; on a CPU the dtype of what it masks."""
    return 1 if setup.on_gpu else value_bytes


def _layer(setup: Setup) -> int:
    m, tokens, c, s = setup.model, setup.tokens, setup.product_bytes, setup.weight_bytes
    h, f = tokens * m.hidden, tokens * m.inner
    kept = _attention(setup)
    if m.family == "gemma2":
        kept += 4 * f * c  # gate, up, gelu of the gate, their product
        # Four norms in fp32: each keeps its input, or a copy of it, and the normalized; two feed products.
        kept += h * (36 if s == 2 else 42 if setup.autocast else 40)
        kept += 4 * (tokens + m.hidden) * FP32
    elif m.family == "llama":
        kept += 4 * f * c + h * (16 if s == 2 else 26 if setup.autocast else 24) + 2 * tokens * FP32
    else:
        norms = 1 if m.family == "gptj" else 2
        adds = {"gptj": 1, "gpt_neox": 1 if m.parallel else 2}.get(m.family, 2)
        # Gelu as one operation; or as five, of which one makes three others fp32 and takes an fp32 copy.
        kept += 16 * f if _gelu_in_fp32(setup) else f * c * (5 if m.family in WRITTEN_OUT else 2)
        kept += h * s * adds + 2 * norms * tokens * s  # the norms' inputs, their means and deviations
        # A norm's output is kept where a product takes it; under autocast as one bf16 copy for each product.
        copies = {"bert": 4, "gptj": 4}.get(m.family, 2)
        kept += h * 2 * copies if setup.autocast else h * s * norms
        kept += 2 * h * _mask_bytes(setup, c) * (m.hidden_dropout > 0)
    if setup.autocast:
        kept += 2 * matrix_elements(m)  # autocast keeps its bf16 copies of the weights
    return kept


def _attention(setup: Setup) -> int:
    """Queries, keys, values, the output, and the scores if they are written out."""
    m, rows, tokens, c = setup.model, setup.micro_batch, setup.tokens, setup.product_bytes
    q, scores = tokens * m.heads * m.head_width, rows * m.heads * setup.sequence**2
    drops = m.attention_dropout > 0
    if setup.attention == "sdpa" and (not drops or setup.on_gpu):  # fused: log-sum-exp instead of the scores
        kept = 4 * q * c + tokens * m.heads * FP32
        if m.family == "llama":  # keys and values that heads share are not repeated
            kept -= 2 * (m.heads - m.kv_heads) * m.head_width * tokens * c
        if m.family == "bert":
            kept += rows * setup.sequence**2 * c  # the mask, as numbers
        if m.family == "gpt_neox":
            kept += 3 * q * c  # the projection, of which the values are a part; a copy of the output is kept too
        return kept
    if setup.attention == "sdpa":  # on a CPU, PyTorch computes attention with dropout in fp32, step by step
        whole = 2 * q * c * (m.family == "gpt2" and rows == 1 and c == FP32)  # the values stay part of a projection
        return 3 * q * FP32 + q * c + 3 * scores * FP32 + whole
    kept = 4 * q * c
    if m.family == "gptj":
        kept += 4 * setup.sequence * m.rotary * c
        kept += 4 * q if setup.weight_bytes == 2 else 0  # GPT-J computes queries and keys in fp32
    if m.family == "gemma2":
        kept += scores * c  # the soft cap's tanh
    fp32_softmax = m.family in ("gptj", "gpt_neox", "gemma2", "llama") or setup.autocast
    kept += scores * (FP32 if fp32_softmax else c)
    if drops:
        late = setup.autocast and m.family in ("bert", "gpt_neox", "gemma2")  # dropped in fp32, then taken to bf16
        kept += scores * (c + _mask_bytes(setup, FP32 if late else c))
    elif fp32_softmax and c == 2:
        kept += scores * c
    return kept


def _logit_bytes(setup: Setup) -> int:
    """Bytes of an element of the loss's log-softmax: fp32, unless a model leaves its logits in 16 bits."""
    return setup.product_bytes if setup.logits == "as_computed" and not setup.autocast else FP32


def _ends(setup: Setup) -> tuple[int, int, int]:
    """What the embeddings keep, what the head after the last layer keeps, and the logits' share of the latter."""
    m, tokens, s = setup.model, setup.tokens, setup.weight_bytes
    h, mask = tokens * m.hidden, tokens * m.hidden * _mask_bytes(setup, s) * (m.embedding_dropout > 0)
    if m.family == "bert":
        embeddings = h * s + 2 * tokens * s + mask  # the norm's input
        if not setup.autocast:
            embeddings += h * s  # the first layer's input
        pooled = setup.micro_batch * m.hidden
        head = pooled * setup.product_bytes * (3 if m.embedding_dropout > 0 else 1)
        if setup.autocast:
            head += 2 * m.hidden**2 + 2 * pooled
        return embeddings, head, 0
    logits = _logit_bytes(setup) * tokens * m.vocabulary  # of the log-softmax
    if m.family == "gemma2":
        embeddings = 2 * setup.sequence * m.head_width * s
        tanh = tokens * m.vocabulary * setup.product_bytes  # the soft cap's
        head = h * (12 if setup.precision == "fp32" else 10) + tanh
    elif m.family == "llama":
        embeddings = 2 * setup.sequence * m.head_width * s
        head = h * (8 if s == 2 else 10 if setup.autocast else 12) + tokens * FP32
    else:
        embeddings = h * s + mask + (2 * setup.sequence * m.rotary * s if m.family == "gpt_neox" else 0)
        head = h * (2 if setup.autocast else s) + 2 * tokens * s
    if setup.autocast:
        head += 2 * m.vocabulary * m.hidden
    return embeddings, head + logits, logits
