"""How a training's loop, libraries and kernels differ from the trainer's."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from study.predict.trace.tape import Gradient, Held, Profile, Tensor

Logits = Literal["fp32", "as_computed"]


@dataclass(frozen=True)
class Loop:
    """What loops of others do. The defaults are the trainer's. Each field moves the errors of many rows."""

    logits: Logits = "fp32"  # for the loss; older models of transformers leave them in 16 bits
    fused_layers: bool = False  # norms and gates are single kernels, or layers are compiled, and keep less
    keeps_logits: bool = False  # the loop holds the model's outputs until the backward pass has ended
    torch_major: int = 2  # PyTorch 1 set gradients to zero and kept them, and its CUDA context had all kernels
    reentrant: bool = False  # recomputation is PyTorch's reentrant kind, outside of FSDP's units, as in transformers 4
    bucket_view: bool = True  # DDP's gradients are its buckets, as in the trainer; PyTorch's default keeps both


OURS = Loop()


# --- fused layers, with RMS norms and gates: transformers' own norm keeps a copy of its input in fp32, and its gate
# the activation by itself. Megatron's and Liger's kernels make them again in the backward pass. So does
# torch.compile: a Llama's layer of 6,400 bytes a token keeps 4,480, as the formula says (torch 2.13 on a CPU, with
# aot_eager_decomp_partition, which cuts a graph as inductor does).

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose layers have RMS norms and gates


def spared_bytes(family: str, dimensions: dict, product_bytes: int, is_selective: bool) -> int:
    """Bytes of a token's activations in a layer that fused norms and gates do not keep."""
    if family not in FAMILIES:
        return 0
    # torchtitan's selective recomputation keeps every second product, also a layer's last one, which no gradient
    # needs. A compiler drops it (measured in the same way).
    if is_selective:
        return product_bytes * dimensions["hidden_size"]
    # Two norms of a layer keep an fp32 copy of their input (transformers, LlamaRMSNorm.forward). The gate keeps its
    # activation, as wide as the feed-forward layer.
    return 2 * 4 * dimensions["hidden_size"] + product_bytes * dimensions["intermediate_size"]


def with_fused_layers(
    traced: Profile, tensors: tuple[Tensor, ...], layer_bytes: int, spares: Callable[[str], bool]
) -> Profile:
    """A pass whose layers keep so many bytes less, as far as a block spares anything."""
    # By block, less for what the layers before it do not keep: while it runs these are held in both passes, because
    # the backward pass frees later layers first.
    more: dict[str, float] = {}
    total = 0
    for block in dict.fromkeys(tensor.block for tensor in tensors):
        more[block] = total
        if spares(block):
            total -= layer_bytes
    by_name = {tensor.name: more[tensor.block] for tensor in tensors}
    gradients = []
    for tensor, most, complete in traced.gradients:
        extra = more[tensor.block]
        gradients.append(Gradient(tensor, _more(most, extra), _more(complete, extra)))
    return replace(
        traced,
        kept=traced.kept + total,
        most=_more(traced.most, total),
        at_use={name: kept + by_name[name] for name, kept in traced.at_use.items()},
        before_use={name: _more(held, by_name[name]) for name, held in traced.before_use.items()},
        gradients=tuple(gradients),
        at_first_gradient=_more(traced.at_first_gradient, total),
    )


def _more(held: Held, kept_bytes: float) -> Held:
    return held._replace(kept=held.kept + kept_bytes)
