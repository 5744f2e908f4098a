"""Predicts the bytes that a rank holds and moves, and its operations in a step, from a model and an arm's config."""

import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from study.core.errors import Stop
from study.predict.memory import deepspeed_memory, fsdp_memory
from study.predict.memory.engine import Engine
from study.predict.memory.fsdp_memory import Sharding
from study.predict.setup import Setup
from study.predict.trace.tape import Gradient, Held, Profile
from study.predict.trace.transformer import SELECTIVE, Transformer, of_a_rank, part

HOST_PROCESS_BYTES = 4e9  # assumed, for each rank with a GPU: Python, PyTorch, CUDA's host side, a data loader
PUBLISHED_BYTES = 2  # of an element in published files


@dataclass(frozen=True)
class Estimate:
    """Memory by component, traffic and operations of the first rank in one optimizer step. Sizes are in bytes."""

    parameters: int
    at_peak: dict[str, int]
    after_step: dict[str, int]
    peak_bytes: int
    peak_when: str
    host_bytes: int  # on a GPU: what is offloaded
    nvme_bytes: dict[str, int]
    traffic: dict[str, int]
    flops_per_rank_and_step: int


@functools.cache
def estimate(setup: Setup) -> Estimate:
    """The prediction for a setup. It is cached, so callers must not change it."""
    engine = engine_of(setup)
    states, times, host_bytes = memory(setup, profile(setup))
    states["other"] = inputs_bytes(setup) + (0 if setup.on_gpu else setup.data_bytes)
    peak_when, most = max(times, key=lambda moment: sum(map(int, moment[1].values())))
    at_peak = _summed(states, most)
    return Estimate(
        parameters=setup.model.parameters,
        at_peak=at_peak,
        after_step=_summed(states, engine.after_step),
        peak_bytes=sum(at_peak.values()),
        peak_when=peak_when,
        host_bytes=host_bytes,
        nvme_bytes=dict.fromkeys(("held", "read_per_step", "written_per_step"), engine.swapped_bytes),
        traffic=dict(Counter(engine.traffic) + exchanged_rows(setup) + exchanged_layers(setup)),
        flops_per_rank_and_step=operations(setup),
    )


def loading_bytes(model: Transformer, ranks: int, weight_bytes: int) -> float:
    """Return what the ranks of a node with GPUs need of the host at most while each loads the model."""
    # A tensor of the files' own type stays in the mapped file, in the page cache that all ranks share. One of another
    # type is a copy of each rank (transformers 5.23, `reproductions/laboratories/loading.py`).
    copied_bytes = 0 if weight_bytes == PUBLISHED_BYTES else weight_bytes
    return ranks * (HOST_PROCESS_BYTES + model.parameters * copied_bytes)


def engine_of(setup: Setup) -> Engine | Sharding:
    """Return the memory model of a setup: that of FSDP, or that of DeepSpeed, DDP and one process."""
    return Sharding(setup) if setup.fsdp else Engine(setup)


def memory(setup: Setup, kept: Profile) -> tuple[dict[str, int], list[tuple[str, dict]], int]:
    """Return what a rank holds all the time, without inputs and data; what at each moment; its bytes on the host."""
    engine = engine_of(setup)
    states = {"constants": setup.model.look.buffers_bytes} | engine.standing
    times = [*moments(engine, kept)]
    if not (setup.on_gpu and engine.on_host):  # without a GPU, what is offloaded is in the same memory
        return states, times, 0
    host_bytes = sum(states.pop(role, 0) for role in engine.on_host)
    return states, times, host_bytes + engine.beside_on_host_bytes


def moments(engine: Engine | Sharding, kept: Profile) -> Iterator[tuple[str, dict]]:
    """Yield the moments of a step's last pass and of its update, each with what is held besides the states."""
    if isinstance(engine, Sharding):
        return fsdp_memory.moments(engine, kept)
    return deepspeed_memory.moments(engine, kept)


def profile(setup: Setup) -> Profile:
    """The activations of a microbatch, as a trace of the model shows them and the setup's library keeps them."""
    if setup.tensor_ranks > 1:
        one = replace(setup, model=of_a_rank(setup.model, setup.tensor_ranks), tensor_ranks=1)
        # A trace of a model with narrower layers is that of a rank. Only its output matrix is still whole.
        seen = profile(one)
        gradients = (each._replace(tensor=part(each.tensor, setup.tensor_ranks)) for each in seen.gradients)
        return replace(seen, gradients=tuple(gradients))
    seen = setup.traced.profile
    if setup.library.fused_layers:
        seen = _with_fused_layers(setup, seen)
    if setup.library.keeps_cache:
        seen = _with_cache(setup, seen)
    return seen


def inputs_bytes(setup: Setup) -> int:
    """The bytes of a microbatch's inputs: token ids, masks, images, sound."""
    return setup.traced.inputs_bytes


def operations(setup: Setup) -> int:
    """The operations of a rank's matrix products in a step, including those that checkpointing repeats."""
    # Ranks that share rows or layers share the operations, too.
    whole = replace(setup, sequence_ranks=1, tensor_ranks=1)
    return whole.traced.flops * setup.accumulation // (setup.sequence_ranks * setup.tensor_ranks)


def _summed(states: dict, now: dict) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for role, size in [*states.items(), *now.items()]:
        sizes[role.removeprefix("host_")] += int(size)
    return {role: size for role, size in sizes.items() if size}


# --- fused layers, with RMS norms and gates: transformers' own norm keeps a copy of its input in fp32, and its gate the
# activation by itself. Megatron's and Liger's kernels make them again in the backward pass. So does torch.compile: a
# Llama's layer of 6,400 bytes a token keeps 4,480, as the formula says (torch 2.13 on a CPU, with
# aot_eager_decomp_partition, which cuts a graph as inductor does).

CACHED = re.compile(r"\b(c_attn(\.base)?\.bias|(k_proj|v_proj)(\.base)?\.weight)$")  # the first size is the output's
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose layers have RMS norms and gates


def spared_bytes(setup: Setup) -> int:
    """Return the bytes of a layer's activations that fused norms and gates do not keep."""
    if setup.model.family not in FAMILIES:
        return 0
    config = setup.model.dimensions
    # torchtitan's selective recomputation keeps every second product, also a layer's last one, which no gradient needs.
    # A compiler drops it (measured in the same way).
    if setup.checkpointing == SELECTIVE:
        return setup.tokens * setup.recipe.product_bytes * config["hidden_size"]
    # Two norms of a layer keep an fp32 copy of their input (transformers, LlamaRMSNorm.forward). The gate keeps its
    # activation, as wide as the feed-forward layer.
    norms = 2 * 4 * config["hidden_size"]
    return setup.tokens * (norms + setup.recipe.product_bytes * config["intermediate_size"])


def _with_fused_layers(setup: Setup, traced: Profile) -> Profile:
    # By block, less for what the layers before it do not keep: while it runs these are held in both passes, because the
    # backward pass frees later layers first.
    more: dict[str, float] = {}
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
    """The sizes of keys and values, which GPT-2 has in larger tensors, and of the logits in fp32."""
    element_bytes = setup.recipe.product_bytes
    if setup.quantized and setup.recipe.autocast and setup.model.family == "gpt_bigcode":
        element_bytes = 4  # autocast's LayerNorm is in fp32, and quantized layers return the type of their input
    cached = [each.shape[0] for each in setup.model.tensors if CACHED.search(each.name)]
    cache = [width * setup.tokens * element_bytes for width in cached]
    return [*cache, 4 * setup.tokens * (setup.model.look.vocabulary or 0)]


def _with_cache(setup: Setup, traced: Profile) -> Profile:
    """Add keys and values, which a model of transformers 4 returns. They are held until the loss is computed."""
    # The loss copies its logits, so it holds as much as its backward pass. A loop that keeps the outputs holds them in
    # the backward pass, and those of the pass before until it has new ones. Measured with transformers 4.31 on a CPU.
    *cache, logits = outputs(setup)
    kept = sum(cache) + logits if setup.library.keeps_logits else 0
    forward = max(Held(min(sum(traced.most), traced.kept + 2 * logits), 0), *traced.before_use.values(), key=sum)
    most = max(_more(forward, sum(cache) + kept), _more(traced.most, kept), key=sum)
    more = dict.fromkeys((tensor.block for tensor in setup.model.tensors), kept)
    return replace(traced, most=most, gradients=_gradients(traced, more))


def _gradients(traced: Profile, more: Mapping[str, float]) -> tuple[Gradient, ...]:
    gradients = []
    for tensor, most, complete in traced.gradients:
        gradients.append(Gradient(tensor, _more(most, more[tensor.block]), _more(complete, more[tensor.block])))
    return tuple(gradients)


def _more(held: Held, kept_bytes: float) -> Held:
    return held._replace(kept=held.kept + kept_bytes)


# --- DeepSpeed Ulysses (0.19.8, ulysses_sp.py): each rank has a part of the tokens. Before attention the ranks exchange
# queries, keys and values, so that each has all tokens of some heads; after attention they exchange back. The backward
# pass does the same with the gradients.

SHARED = ("num_attention_heads", "num_key_value_heads", "num_hidden_layers", "hidden_size")
POSITION_BYTES = 8  # each layer gathers the positions of a row, which are int64


def exchanged_rows(setup: Setup) -> Counter[str]:
    """Bytes by collective that a rank moves in a step among the ranks that share its rows, counted as in records."""
    ranks = setup.sequence_ranks
    if ranks == 1:
        return Counter()
    config = setup.model.dimensions
    known = [config.get(name) or 0 for name in SHARED]
    queries, keys, layers, width = known
    if not setup.model.has_fused_attention or 0 in known or queries % ranks or (keys % ranks and ranks % keys):
        what = (
            f"ranks share rows by fused attention, with heads for each: {setup.model.family} has {queries} and {keys}"
        )
        raise Stop(what, "give another model, or fewer ranks for a row", "unavailable")
    heads = queries + max(keys, ranks)  # if there are fewer than ranks, those of keys are repeated
    # Under autocast, queries and keys are rotated in fp32, and attention itself converts them to 16 bits.
    rotated = setup.weight_bytes if setup.autocast else setup.recipe.product_bytes
    # Four tensors travel. Queries and keys have the first type, the output and the values the second; in both pairs one
    # has the heads of the queries, and one those of the keys.
    layer = setup.tokens * (config.get("head_dim") or width // queries) * (rotated + setup.recipe.product_bytes) * heads
    forward = 2 if setup.checkpointing else 1
    # Integers have no gradient, so the backward pass gathers none, except where it runs a layer again.
    positions = setup.sequence * POSITION_BYTES * forward  # of one row: all rows have the same
    passes = setup.accumulation * layers
    return Counter(all_to_all=layer * (forward + 1) * passes, all_gather=positions * passes)


# Linear layers of a layer: each needs an all-reduce, in the backward or in the forward pass. torch's plans for Llama
# gather the inputs of attention and of the MLP, so they sum twice (torchtitan, models/llama3/infra/parallelize.py).
BY_COLUMNS = {None: 5, "full_shard": 2, "shard_grad_op": 2}  # by FSDP
BY_ROWS = 2


def exchanged_layers(setup: Setup) -> Counter[str]:
    """Bytes by collective that a rank moves in a step among the ranks that divide its layers, counted as in records."""
    if setup.tensor_ranks == 1:
        return Counter()
    config = setup.model.dimensions
    # A layer's outputs are summed in the type of the products; the gradients of its inputs in the type of the values
    # between layers. Megatron-LM and torch sum once for queries, keys and values; AutoTP sums for each of them.
    forward = BY_ROWS * setup.recipe.product_bytes * (2 if setup.checkpointing else 1)
    backward = BY_COLUMNS[setup.fsdp] * setup.weight_bytes
    elements = setup.accumulation * setup.tokens * config["hidden_size"]
    moved = Counter(all_reduce=elements * (forward + backward) * config["num_hidden_layers"])
    if any(tensor.name == "lm_head.weight" for tensor in of_a_rank(setup.model, setup.tensor_ranks).tensors):
        moved["all_reduce"] += elements * setup.weight_bytes
        moved["all_gather"] = setup.accumulation * setup.tokens * config["vocab_size"] * setup.recipe.product_bytes
    return moved
