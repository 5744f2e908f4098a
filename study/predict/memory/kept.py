"""Activations that libraries keep otherwise than the traced model does.

Fused layers, with RMS norms and gates: transformers' own norm keeps a copy of its input in fp32, and its gate the
activation by itself. Megatron's and Liger's kernels make them again in the backward pass. So does torch.compile: a
Llama's layer of 6,400 bytes a token keeps 4,480 (torch 2.13 on a CPU, aot_eager_decomp_partition, which cuts a graph as
inductor does), as the formula says.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from study.core.settings import AUTOCAST
from study.predict.memory.profile import Gradient, Held, Profile
from study.predict.setup import Setup
from study.predict.trace.transformer import SELECTIVE

CACHED = re.compile(r"\b(c_attn(\.base)?\.bias|(k_proj|v_proj)(\.base)?\.weight)$")  # the first size is the output's
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose layers have RMS norms and gates


def by_library(setup: Setup, traced: Profile) -> Profile:
    """Return a trace's activations as the setup's library keeps them."""
    if setup.library.fused_layers:
        traced = _with_fused_layers(setup, traced)
    return _with_cache(setup, traced) if setup.library.keeps_cache else traced


def spared_bytes(setup: Setup) -> int:
    """Return the bytes of a layer that fused layers do not keep.

    torchtitan's selective recomputation keeps every second product, also a layer's last one, which no gradient needs. A
    compiler drops it (measured in the same way).
    """
    if setup.model.family not in FAMILIES:
        return 0
    config = setup.model.dimensions
    if setup.checkpointing == SELECTIVE:
        return setup.tokens * setup.product_bytes * config["hidden_size"]
    norms = 2 * 4 * config["hidden_size"]
    return setup.tokens * (norms + setup.product_bytes * config["intermediate_size"])


def _with_fused_layers(setup: Setup, traced: Profile) -> Profile:
    """Return what is kept if layers are fused. A recomputed layer keeps its input as before."""
    more: dict[str, float] = {}  # by block, for what the layers before it do not keep
    total = 0
    for block in dict.fromkeys(tensor.block for tensor in setup.model.tensors):
        more[block] = total
        recomputed = setup.checkpointing != SELECTIVE and setup.computes_again(block)
        if block.startswith("layer.") and not recomputed:
            total -= spared_bytes(setup)
    by_name = {tensor.name: more[tensor.block] for tensor in setup.model.tensors}
    return replace(
        traced,
        kept=traced.kept + total,
        most=_more(traced.most, total),
        at_use={name: kept + by_name[name] for name, kept in traced.at_use.items()},
        before_use={name: _more(held, by_name[name]) for name, held in traced.before_use.items()},
        gradients=_gradients(traced, more),
    )


def outputs(setup: Setup) -> list[int]:
    """Return the sizes of keys and values, which GPT-2 has in larger tensors, and of the logits in fp32."""
    # Autocast's LayerNorm is in fp32, and quantized layers return the type of their input.
    in_fp32 = setup.quantized and setup.precision in AUTOCAST and setup.model.family == "gpt_bigcode"
    token_bytes = setup.tokens * (4 if in_fp32 else setup.product_bytes)
    cache = [each.shape[0] * token_bytes for each in setup.model.tensors if CACHED.search(each.name)]
    return [*cache, 4 * setup.tokens * (setup.model.look.vocabulary or 0)]


def _with_cache(setup: Setup, traced: Profile) -> Profile:
    """Return what is kept if a model returns its keys and values. They are held until the loss is computed.

    The loss copies its logits, so it holds as much as its backward pass. A loop that keeps the outputs holds them in
    the backward pass, and those of the pass before until it has new ones. Measured with transformers 4.31 on a CPU.
    """
    *cache, logits = outputs(setup)
    kept = (sum(cache) + logits) * setup.library.keeps_logits
    forward = max(Held(min(sum(traced.most), traced.kept + 2 * logits), 0), *traced.before_use.values(), key=sum)
    most = max(_more(forward, sum(cache) + kept), _more(traced.most, kept), key=sum)
    more = dict.fromkeys((tensor.block for tensor in setup.model.tensors), kept)
    return replace(traced, most=most, gradients=_gradients(traced, more))


def _gradients(traced: Profile, more: Mapping[str, float]) -> tuple[Gradient, ...]:
    """Return the gradients with more bytes kept, by the block of their tensor."""
    gradients = []
    for tensor, most, complete in traced.gradients:
        kept_bytes = more.get(tensor.block, 0)
        gradients.append(Gradient(tensor, _more(most, kept_bytes), _more(complete, kept_bytes)))
    return tuple(gradients)


def _more(held: Held, kept_bytes: float) -> Held:
    return held._replace(kept=held.kept + kept_bytes)
