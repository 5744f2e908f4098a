"""Predicts which ranks exchange the bytes of a step: all, those of a node, or those that share layers or rows."""

from dataclasses import replace

from study.predictor.estimate import traffic
from study.predictor.memory import fsdp_memory, sequence, tensor
from study.predictor.memory.engine import Engine
from study.predictor.memory.fsdp_memory import Sharding
from study.predictor.setup import Setup
from study.spec.node_traffic import Groups


def predicted(setup: Setup, node_ranks: int | None = None) -> Groups:
    """Return the bytes that the first rank moves in a step, by ranks. ZeRO++'s gradients need `node_ranks`."""
    everyone = tuple(range(setup.ranks))
    if setup.fsdp:
        sharing = setup.sharing_ranks
        groups = {"all_reduce": everyone[::sharing]}
        sent = fsdp_memory.traffic(Sharding(setup))
        return {kind: {groups.get(kind, everyone[:sharing]): size} for kind, size in sent.items()}
    engine = Engine(setup)
    alike = everyone[:: setup.tensor_ranks]  # the ranks that have the same part of each layer
    moved: Groups = {kind: {alike: size} for kind, size in traffic(Engine(_unquantized(setup))).items()}
    if setup.second_partition and "all_gather" in moved:
        # All ranks gather each weight once; later gathers read hpZ's second copy.
        once = (engine.part + engine.frozen_part) * engine.ranks * setup.weight_bytes
        second = everyone[: setup.second_partition]
        everything = moved["all_gather"][everyone]
        moved["all_gather"] = {everyone: once}
        moved["all_gather"][second] = moved["all_gather"].get(second, 0) + everything - once
    near = everyone[: setup.sequence_ranks * setup.tensor_ranks]
    for kind, size in {**sequence.exchanged(setup), **tensor.exchanged(setup)}.items():
        of_kind = moved.setdefault(kind, {})
        of_kind[near] = of_kind.get(near, 0) + size
    zero = (setup.deepspeed or {}).get("zero_optimization", {})
    if engine.stage == 3 and zero.get("zero_quantized_weights"):
        moved["all_gather"] = _in_8_bits(engine, moved["all_gather"])
    if engine.stage == 3 and zero.get("zero_quantized_gradients") and node_ranks:
        moved |= _in_4_bits(engine, moved["reduce_scatter"][everyone], node_ranks)
    return moved


def _unquantized(setup: Setup) -> Setup:
    """The setup without ZeRO++'s quantizers. They are applied here, because they depend on which ranks share a node."""
    config = setup.deepspeed or {}
    zero = config.get("zero_optimization", {})
    plain = {name: value for name, value in zero.items() if not name.startswith("zero_quantized_")}
    return replace(setup, deepspeed=config | {"zero_optimization": plain}) if zero else setup


def _in_8_bits(engine: Engine, gathered: dict[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
    """qwZ: a byte for each element that a pass gathers. Read in DeepSpeed 0.19.8, never run.

    The scales (4 bytes for some thousand elements) are left out. Small weights that stay whole are not quantized.
    """
    everyone = max(gathered, key=len)
    unquantized = {everyone: engine.stay_elements * engine.weight_bytes}
    return {
        ranks: (size - unquantized.get(ranks, 0)) / engine.weight_bytes + unquantized.get(ranks, 0)
        for ranks, size in gathered.items()
    }


def _in_4_bits(engine: Engine, reduced: float, node_ranks: int) -> Groups:
    """qgZ: half a byte for each element, exchanged inside a node, and then for a rank's part between nodes.

    Read in DeepSpeed 0.19.8 (all_to_all_quant_reduce), never run. The scales are left out. Vectors, and tensors whose
    size is no multiple of 2 N, are not quantized.
    """
    quantized = sum(t.elements for t in engine.tensors if len(t.shape) > 1 and t.elements % (2 * engine.ranks) == 0)
    quantized *= engine.accumulation
    inside = tuple(range(node_ranks))
    across = tuple(range(0, engine.ranks, node_ranks))
    exchanged = {inside: quantized / 2, across: quantized / 2 / node_ranks}
    rest = {tuple(range(engine.ranks)): reduced - quantized * engine.weight_bytes}
    exchanged = {ranks: size for ranks, size in exchanged.items() if len(ranks) > 1}
    return {"reduce_scatter": rest, "all_to_all": exchanged}
