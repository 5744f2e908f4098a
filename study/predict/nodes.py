"""Predicts which ranks exchange the bytes of a step: all, those of a node, or those that share layers or rows."""

from study.core.node_traffic import Groups
from study.predict.estimate import exchanged, traffic
from study.predict.memory import fsdp_memory
from study.predict.memory.engine import Engine
from study.predict.memory.fsdp_memory import Sharding
from study.predict.setup import Setup


def predicted(setup: Setup) -> Groups:
    """Return the bytes that the first rank moves in a step, by ranks.

    Nothing where ZeRO++ quantizes what it sends: no run has shown which of these bytes stay inside a node.
    """
    everyone = tuple(range(setup.ranks))
    if setup.fsdp:
        alike = everyone[: setup.sharing_ranks : setup.tensor_ranks]
        between = {"all_reduce": everyone[:: setup.sharing_ranks]}
        sent = fsdp_memory.traffic(Sharding(setup))
        moved: Groups = {kind: {between.get(kind, alike): size} for kind, size in sent.items()}
    else:
        engine = Engine(setup)
        if engine.quantizes_weights or engine.quantizes_gradients:
            return {}
        alike = everyone[:: setup.tensor_ranks]  # the ranks that have the same part of each layer
        moved = {kind: {alike: size} for kind, size in traffic(engine).items()}
        if setup.second_partition and "all_gather" in moved:
            # All ranks gather each weight once; later gathers read hpZ's second copy.
            once = (engine.part + engine.frozen_part) * engine.ranks * setup.weight_bytes
            again = moved["all_gather"][everyone] - once
            moved["all_gather"] = {everyone: once}
            _add(moved, "all_gather", everyone[: setup.second_partition], again)
    for kind, size in exchanged(setup).items():
        _add(moved, kind, everyone[: setup.sequence_ranks * setup.tensor_ranks], size)
    return moved


def _add(moved: Groups, kind: str, ranks: tuple[int, ...], size: float) -> None:
    groups = moved.setdefault(kind, {})
    groups[ranks] = groups.get(ranks, 0) + size
