"""Trainings in other people's loops, with older releases of libraries, or with other kernels than the trainer's."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from study.predict.trace.asked import TraceOptions
from study.predict.trace.tape import Gradient, Held, Profile
from study.predict.training import Recomputation, Training

Logits = Literal["fp32", "as_computed"]
CACHED = re.compile(r"\b(c_attn(\.base)?\.bias|(k_proj|v_proj)(\.base)?\.weight)$")  # the first size is the output's
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose layers have RMS norms and gates


@dataclass(frozen=True)
class OthersTraining(Training):
    """How a loop differs from the trainer's. Each field moves the errors of many rows."""

    logits: Logits = "fp32"  # for the loss; older models of transformers leave them in 16 bits
    fused_layers: bool = False  # norms and gates are single kernels, or layers are compiled, and keep less
    keeps_logits: bool = False  # the loop holds the model's outputs until the backward pass has ended
    keeps_cache: bool = False  # the model returns keys and values: transformers 4 under a checkpointing not its own
    torch_major: int = 2  # PyTorch 1 set gradients to zero and kept them, and its CUDA context had all kernels
    bucket_view: bool = True  # DDP's gradients are its buckets, as in the trainer; PyTorch's default keeps both

    @property
    def trace_options(self) -> TraceOptions:
        keeps_logits = self.keeps_logits and not self.keeps_cache
        return super().trace_options._replace(logits=self.logits, keeps_logits=keeps_logits)

    @property
    def kept_outputs(self) -> list[int]:
        return self.outputs if self.keeps_cache and self.keeps_logits else []

    @property
    def profile(self) -> Profile:
        seen = super().profile
        if self.fused_layers:
            seen = self._with_fused_layers(seen)
        return self._with_cache(seen) if self.keeps_cache else seen

    # --- fused layers, with RMS norms and gates: transformers' own norm keeps a copy of its input in fp32, and its gate
    # the activation by itself. Megatron's and Liger's kernels make them again in the backward pass. So does
    # torch.compile: a Llama's layer of 6,400 bytes a token keeps 4,480, as the formula says (torch 2.13 on a CPU, with
    # aot_eager_decomp_partition, which cuts a graph as inductor does).

    @property
    def spared_bytes(self) -> int:
        """Bytes of a layer's activations that fused norms and gates do not keep."""
        model = self.rank_model
        if model.family not in FAMILIES:
            return 0
        config, product_bytes = model.dimensions, self.recipe.product_bytes
        # torchtitan's selective recomputation keeps every second product, also a layer's last one, which no gradient
        # needs. A compiler drops it (measured in the same way).
        if self.batch.recomputation is Recomputation.SELECTIVE:
            return self.tokens * product_bytes * config["hidden_size"]
        # Two norms of a layer keep an fp32 copy of their input (transformers, LlamaRMSNorm.forward). The gate keeps its
        # activation, as wide as the feed-forward layer.
        norms = 2 * 4 * config["hidden_size"]
        return self.tokens * (norms + product_bytes * config["intermediate_size"])

    def _with_fused_layers(self, traced: Profile) -> Profile:
        # By block, less for what the layers before it do not keep: while it runs these are held in both passes, because
        # the backward pass frees later layers first.
        more: dict[str, float] = {}
        total = 0
        is_selective = self.batch.recomputation is Recomputation.SELECTIVE
        for block in dict.fromkeys(tensor.block for tensor in self.model.tensors):
            more[block] = total
            if block.startswith("layer.") and (is_selective or not self.computes_again(block)):
                total -= self.spared_bytes
        by_name = {tensor.name: more[tensor.block] for tensor in self.model.tensors}
        return replace(
            traced,
            kept=traced.kept + total,
            most=_more(traced.most, total),
            at_use={name: kept + by_name[name] for name, kept in traced.at_use.items()},
            before_use={name: _more(held, by_name[name]) for name, held in traced.before_use.items()},
            gradients=_gradients(traced, more),
            at_first_gradient=_more(traced.at_first_gradient, total),
        )

    # --- keys and values, which a model of transformers 4 returns

    @property
    def outputs(self) -> list[int]:
        """The sizes of keys and values, which GPT-2 has in larger tensors, and of the logits in fp32."""
        model = self.rank_model
        element_bytes = self.recipe.product_bytes
        if self.quantized and self.recipe.autocast and model.family == "gpt_bigcode":
            element_bytes = 4  # autocast's LayerNorm is in fp32, and quantized layers return the type of their input
        cached = [tensor.shape[0] for tensor in model.tensors if CACHED.search(tensor.name)]
        cache = [width * self.tokens * element_bytes for width in cached]
        return [*cache, 4 * self.tokens * (model.look.vocabulary or 0)]

    def _with_cache(self, traced: Profile) -> Profile:
        # They are held until the loss is computed. The loss copies its logits, so it holds as much as its backward
        # pass. A loop that keeps the outputs holds them in the backward pass, and those of the pass before until it has
        # new ones. Measured with transformers 4.31 on a CPU.
        *cache, logits = self.outputs
        kept = sum(cache) + logits if self.keeps_logits else 0
        forward = max(Held(min(sum(traced.most), traced.kept + 2 * logits), 0), *traced.before_use.values(), key=sum)
        most = max(_more(forward, sum(cache) + kept), _more(traced.most, kept), key=sum)
        more = dict.fromkeys((tensor.block for tensor in self.model.tensors), kept)
        first = _more(traced.at_first_gradient, kept)
        return replace(traced, most=most, gradients=_gradients(traced, more), at_first_gradient=first)


def _gradients(traced: Profile, more: Mapping[str, float]) -> tuple[Gradient, ...]:
    gradients = []
    for tensor, most, complete in traced.gradients:
        gradients.append(Gradient(tensor, _more(most, more[tensor.block]), _more(complete, more[tensor.block])))
    return tuple(gradients)


def _more(held: Held, kept_bytes: float) -> Held:
    return held._replace(kept=held.kept + kept_bytes)
