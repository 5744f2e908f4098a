"""Predicts which ranks exchange the bytes of a step: all, those of a node, or those that share layers or rows."""

from study.predictor.estimate import exchanged, traffic
from study.predictor.memory import fsdp_memory
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
        alike = everyone[: sharing : setup.tensor_ranks]
        sent = fsdp_memory.traffic(Sharding(setup))
        sums: Groups = {kind: {groups.get(kind, alike): size} for kind, size in sent.items()}
        for kind, size in exchanged(setup).items():
            _add(sums, kind, everyone[: setup.tensor_ranks], size)
        return sums
    engine = Engine(setup)
    alike = everyone[:: setup.tensor_ranks]  # the ranks that have the same part of each layer
    moved: Groups = {kind: {alike: size} for kind, size in traffic(engine, quantized=False).items()}
    if setup.second_partition and "all_gather" in moved:
        # All ranks gather each weight once; later gathers read hpZ's second copy.
        once = (engine.part + engine.frozen_part) * engine.ranks * setup.weight_bytes
        again = moved["all_gather"][everyone] - once
        moved["all_gather"] = {everyone: once}
        _add(moved, "all_gather", everyone[: setup.second_partition], again)
    for kind, size in exchanged(setup).items():
        _add(moved, kind, everyone[: setup.sequence_ranks * setup.tensor_ranks], size)
    if engine.stage == 3 and engine.quantizes_weights and engine.ranks > 1:
        moved["all_gather"] = _in_8_bits(engine, moved["all_gather"])
    if engine.stage == 3 and engine.quantizes_gradients and node_ranks:
        moved |= _in_4_bits(engine, moved["reduce_scatter"][everyone], node_ranks)
    return moved


def _add(moved: Groups, kind: str, ranks: tuple[int, ...], size: float) -> None:
    groups = moved.setdefault(kind, {})
    groups[ranks] = groups.get(ranks, 0) + size


def _in_8_bits(engine: Engine, gathered: dict[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
    """qwZ: a byte for each element that a pass gathers. Read in DeepSpeed 0.19.8, never run.

    The scales (4 bytes for some thousand elements) are left out. Small weights that stay whole are not quantized.
    """
    quantized = {ranks: size / engine.weight_bytes for ranks, size in gathered.items()}
    quantized[max(gathered, key=len)] += engine.stay_elements * (engine.weight_bytes - 1)
    return quantized


def _in_4_bits(engine: Engine, reduced: float, node_ranks: int) -> Groups:
    """qgZ: half a byte for each element, exchanged inside a node, and then for a rank's part between nodes.

    Read in DeepSpeed 0.19.8 (all_to_all_quant_reduce), never run. The scales are left out. Vectors, and tensors whose
    size is no multiple of 2 N, are not quantized.
    """
    quantized = sum(t.elements for t in engine.tensors if len(t.shape) > 1 and t.elements % (2 * engine.ranks) == 0)
    quantized *= engine.accumulation
    inside = tuple(range(node_ranks))
    across = tuple(range(0, engine.ranks, node_ranks))
    sent = {inside: quantized / 2, across: quantized / 2 / node_ranks}
    sent = {ranks: size for ranks, size in sent.items() if len(ranks) > 1}
    rest = {tuple(range(engine.ranks)): reduced - quantized * engine.reduced_bytes}
    return {"reduce_scatter": rest, "all_to_all": sent}
