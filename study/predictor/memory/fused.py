"""Activations that fused kernels and compiled layers do not keep, in layers with RMS norms and gates.

transformers' own norm keeps a copy of its input in fp32, and its gate the activation by itself. Megatron's and Liger's
kernels make them again in the backward pass. So does torch.compile: a Llama's layer of 6,400 bytes a token keeps 4,480
(torch 2.13 on a CPU, aot_eager_decomp_partition, which cuts a graph as inductor does), as the formula says.
"""

from dataclasses import replace

from study.predictor.memory.profile import Gradient, Held, Profile
from study.predictor.setup import Setup
from study.predictor.tracing.transformer import SELECTIVE

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def spared_bytes(setup: Setup) -> int:
    """Return the bytes of a layer that are not kept.

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


def with_fused_layers(setup: Setup, traced: Profile) -> Profile:
    """Return a trace's activations less what fused layers do not keep. A recomputed layer still keeps its input."""
    spared = spared_bytes(setup)
    before: dict[str, int] = {}  # by block: the bytes that the layers before it do not keep
    total = 0
    for tensor in setup.model.tensors:
        if tensor.block in before:
            continue
        before[tensor.block] = total
        recomputed = setup.checkpointing != SELECTIVE and setup.computes_again(tensor.block)
        total += spared * (tensor.block.startswith("layer.") and not recomputed)
    by_name = {tensor.name: before[tensor.block] for tensor in setup.model.tensors}

    def less(held: Held, name: str) -> Held:
        return held._replace(kept=held.kept - by_name[name])

    gradients = (
        Gradient(each.tensor, less(each.most, each.tensor.name), less(each.complete, each.tensor.name))
        for each in traced.gradients
    )
    return replace(
        traced,
        kept=traced.kept - total,
        most=traced.most._replace(kept=traced.most.kept - total),
        at_use={name: kept - by_name[name] for name, kept in traced.at_use.items()},
        before_use={name: less(held, name) for name, held in traced.before_use.items()},
        gradients=tuple(gradients),
    )
