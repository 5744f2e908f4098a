"""Which bytes of a step stay inside a node, and which go between nodes. Ranks fill one node after another."""

# By collective: bytes of the whole tensor, by the ranks that take part.
Groups = dict[str, dict[tuple[int, ...], float]]
RING = {"all_reduce": 2.0, "barrier": 0.0}  # how often a rank sends its share of the tensor; other collectives: once


def by_node(moved: Groups, node_ranks: int) -> dict[str, dict[str, float]]:
    """Return bytes by collective among ranks of one node, and among ranks of several nodes.

    As in papers, all bytes of a collective among several nodes count as between nodes.
    """
    split: dict[str, dict[str, float]] = {"inside": {}, "between": {}}
    for kind, groups in moved.items():
        for ranks, size in groups.items():
            where = split["inside" if len(_nodes(ranks, node_ranks)) == 1 else "between"]
            if size:
                where[kind] = where.get(kind, 0) + size
    return split


def sent_by_a_node(moved: Groups, node_ranks: int, shares: dict[str, float] = RING) -> float:
    """Return bytes that a node sends to other nodes, on rings that enter and leave each node once.

    In a ring over all ranks, only the last rank of a node sends to the next node. If each rank of a node has its own
    ring with one rank of each other node, all ranks send.
    """
    sent = 0.0
    for kind, groups in moved.items():
        for ranks, size in groups.items():
            nodes = _nodes(ranks, node_ranks)
            if len(nodes) > 1:
                rings = node_ranks * len(nodes) / len(ranks)
                sent += rings * shares.get(kind, 1.0) * size * (len(ranks) - 1) / len(ranks)
    return sent


def _nodes(ranks: tuple[int, ...], node_ranks: int) -> set[int]:
    return {rank // node_ranks for rank in ranks}
