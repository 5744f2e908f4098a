"""What gloo sends for collectives, by formulas: a second way to the number of bytes that the kernel counts."""

from study.records.schema import Record
from study.records.sections import Collective


def gloo_wire_bytes(counts: dict[str, Collective], ranks: int) -> float:
    """Bytes that a rank writes to its sockets for these collectives, averaged over the ranks.

    The formulas are those of ring algorithms. Gloo runs a reduce-scatter as an all-reduce and keeps a part, so the wire
    carries twice the logical bytes. Its reduce has no formula: two ranks together write 1.5 to 2.4 times the tensor.
    """
    factor = {"barrier": 0, "all_gather": 1, "broadcast": 1, "all_to_all": 1, "all_reduce": 2, "reduce_scatter": 2}
    return sum(
        size * factor[kind] * (len(group) - 1) / len(group)
        for kind, count in counts.items()
        for group, size in count.by_ranks(ranks).items()
    )


def wire_bytes_per_rank(record: Record) -> list[float]:
    """What each rank should write to its sockets in a step."""
    return [gloo_wire_bytes(counts, record.observed.ranks or 1) for counts in record.traffic.per_rank]
