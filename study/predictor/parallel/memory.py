"""What a rank of a layout holds and sends, from the trace of the whole model.

With sequence parallelism, ranks that divide a layer divide all of its activations. As Megatron-LM does, gradients are
summed in fp32 beside 16-bit weights, and the replicas share master copies and moments (its distributed optimizer).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from study.predictor.memory.kept import spared_bytes
from study.predictor.memory.profile import Profile, Tensor
from study.predictor.papers import RECIPES, recipe_of
from study.predictor.parallel.layout import Layout, layers_of
from study.predictor.parallel.pipeline import in_flight
from study.predictor.setup import Setup

GRADIENT_BYTES = 4  # accumulate_allreduce_grads_in_fp32, which --bf16 turns on


def whole_pass(setup: Setup) -> Setup:
    """Return the setup of a pass over the undivided model, with a rank's part of the rows."""
    among = setup.layout.context if setup.layout else 1
    library = replace(setup.library, fused_layers=False)
    whole = replace(setup, layout=None, deepspeed=None, group=None, library=library)
    return replace(whole, ranks=among, sequence_ranks=among)


def held_tensors(setup: Setup, layout: Layout, place: int) -> list[Tensor]:
    """Return the tensors of a rank of a pipeline. If one matrix embeds and reads out, both ends have it."""
    stages = layout.blocks(setup.model)[place :: layout.pipeline]
    tensors = [each for each in setup.model.tensors if any(each.block in stage for stage in stages)]
    reads_out = any(each.block == "head" and len(each.shape) > 1 for each in setup.model.tensors)
    if place == layout.pipeline - 1 and place and not reads_out:
        tensors += [max((t for t in setup.model.tensors if t.block == "embeddings"), key=lambda t: t.elements)]
    return tensors


def owned(setup: Setup, layout: Layout, place: int) -> float:
    """Return the elements whose optimizer states a rank holds. Replicas share them; those of experts are fewer."""
    trained = [tensor for tensor in held_tensors(setup, layout, place) if tensor.trains]
    if not setup.stage:
        return sum(map(layout.elements, trained))
    replicas = setup.group or layout.replicas(setup.ranks)
    experts = sum(layout.elements(tensor) for tensor in trained if len(tensor.shape) == 3)
    return (sum(map(layout.elements, trained)) + (layout.expert - 1) * experts) / replicas


def states(setup: Setup, layout: Layout, place: int) -> dict[str, int]:
    """Return the bytes that a rank of a pipeline holds during the whole step."""
    weight_bytes, _, of_optimizer = RECIPES[recipe_of(setup.precision, setup.optimizer)]
    tensors = held_tensors(setup, layout, place)
    trained = [tensor for tensor in tensors if tensor.trains]
    master_bytes = setup.state_bytes if setup.precision == "bf16_cast" else 0
    updated = owned(setup, layout, place)
    gradient_bytes = GRADIENT_BYTES
    if layout.by_nanotron:  # it also has them in 16 bits (gradient_accumulator.py), and in DDP's buckets without ZeRO
        in_buckets = not setup.stage and layout.replicas(setup.ranks) > 1
        gradient_bytes += weight_bytes * (1 + in_buckets)
    return {
        "weights": weight_bytes * sum(map(layout.elements, tensors)),
        "gradients": gradient_bytes * sum(map(layout.elements, trained)),
        "master": round(master_bytes * updated),
        "moments": round((of_optimizer - master_bytes) * updated),
    }


class Activations(NamedTuple):
    """Bytes of a microbatch: kept by the embeddings and by each layer, made in a layer's backward pass and the loss."""

    embeddings: float
    layer: float
    backward: float
    loss: float


def activations(setup: Setup, traced: Profile) -> Activations:
    """Read the bytes from a trace of the whole model. Megatron's fused kernels keep less than transformers' own."""
    begins: dict[str, float] = {}
    for tensor in setup.model.tensors:
        kept = traced.at_use.get(tensor.name, traced.most.kept)
        begins[tensor.block] = min(kept, begins.get(tensor.block, kept))
    end = begins.get("head", traced.most.kept)
    layer = (end - begins["layer.0"]) / layers_of(setup.model) - (0 if setup.checkpointing else spared_bytes(setup))
    backward = [each.most.in_use for each in traced.gradients if each.tensor.block.startswith("layer.")]
    return Activations(begins["layer.0"], layer, max(backward, default=0.0), traced.most.total - end)


def memory(setup: Setup, layout: Layout, traced: Profile) -> tuple[dict[str, int], list[tuple[str, dict]], int]:
    """Return the states, the moments and the host bytes of the rank that holds the most."""
    kept = activations(whole_pass(setup), traced)
    if layout.by_nanotron and not setup.checkpointing:  # its gates keep the activation
        gates = whole_pass(setup).tokens * setup.product_bytes * setup.model.dimensions["intermediate_size"]
        kept = kept._replace(layer=kept.layer + gates)
    ranks = [(states(setup, layout, place), *_passes(setup, layout, kept, place)) for place in range(layout.pipeline)]
    most = max(ranks, key=lambda rank: sum(rank[0].values()) + max(sum(each.values()) for each in rank[1:]))
    return most[0], [("backward", each) for each in most[1:]], 0


def _passes(setup: Setup, layout: Layout, traced: Activations, place: int) -> Iterator[dict[str, int]]:
    """Yield what a rank holds beside its states: in a layer's backward pass, and on the last rank in the loss."""
    parts = layout.blocks(setup.model)
    waiting = in_flight(layout, place, setup.accumulation)
    layers = sum(block.startswith("layer.") for block in parts[place]) * traced.layer
    kept_bytes = waiting * (layers + traced.embeddings * (place == 0)) / layout.tensor
    yield {"activations": int(kept_bytes), "temporaries": int(traced.backward / layout.tensor)}
    if place == layout.pipeline - 1:
        yield {"activations": int(kept_bytes), "temporaries": int(traced.loss / layout.tensor)}


class Exchange(NamedTuple):
    """Collectives of a pass over a layer, and the bytes of each."""

    kind: str
    group: str  # of a layout
    calls: int
    size_bytes: float


def hidden_bytes(setup: Setup) -> int:
    """Bytes between two layers, of a rank's part of the rows."""
    width = next(tensor.shape[-1] for tensor in setup.model.tensors if len(tensor.shape) > 1)
    return whole_pass(setup).tokens * width * setup.product_bytes


def exchanges(setup: Setup, layout: Layout, phase: str) -> list[Exchange]:
    """Return what ranks send each other for a layer. A pass that is computed again sends again."""
    config = setup.model.dimensions
    again = 2 if setup.checkpointing and phase == "backward" else 1
    between = hidden_bytes(setup)
    kinds = []
    if layout.tensor > 1:
        kinds += [Exchange(kind, "tensor", 2 * again, between) for kind in ("all_gather", "reduce_scatter")]
    if layout.context > 1:  # keys and values go around, and their gradients
        heads = config.get("num_attention_heads", 1)
        share = config.get("num_key_value_heads", heads) / heads  # silent: as many, transformers' default
        rounds = (layout.context - 1) * (1 if phase == "forward" else again + 1)
        kinds.append(Exchange("send", "context", rounds, 2 * share * between / layout.tensor))
    if layout.expert > 1:  # tokens go to their experts and back
        chosen = config.get("num_experts_per_tok", 1)
        kinds.append(Exchange("all_to_all", "expert", 2 * again, chosen * between / layout.tensor))
    return kinds


def traffic(setup: Setup, layout: Layout) -> dict[str, int]:
    """Return the bytes by collective that the first rank moves in a step. Each collective counts its whole tensor."""
    moved: Counter[str] = Counter()
    blocks = [block for part in layout.blocks(setup.model)[:: layout.pipeline] for block in part]
    layers = sum(block.startswith("layer.") for block in blocks)
    for phase in ("forward", "backward"):
        for each in exchanges(setup, layout, phase):
            moved[each.kind] += round(each.calls * each.size_bytes * layers * setup.accumulation)
    if layout.tensor > 1:  # the backward pass gathers the inputs again, for the gradients of weights
        moved["all_gather"] += 2 * hidden_bytes(setup) * layers * setup.accumulation
    if layout.pipeline > 1:
        hops = 2 * layout.chunks - 1
        moved["send"] += hops * hidden_bytes(setup) // layout.tensor * setup.accumulation
    if layout.replicas(setup.ranks) > 1:
        first_stage = states(setup, layout, 0)
        shared = {"reduce_scatter": first_stage["gradients"], "all_gather": first_stage["weights"]}
        moved.update(shared if setup.stage else {"all_reduce": first_stage["gradients"]})
    return dict(moved)
