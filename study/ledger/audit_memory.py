"""Audit of a record's memory: parts fit into wholes, and each rank holds its share of the states."""

import math
from collections.abc import Iterator

from study.ledger.tolerances import EXACT_ELEMENTS, PADDING, same_elements
from study.records.schema import Record

NESTED = (("peak_allocated", "peak_reserved"), ("peak_reserved", "the device"), ("device_used", "the device"))
ADAM = ("AdamW", "MasterAdamW", "DeepSpeedCPUAdam")  # two moments of an element each


def memory(record: Record) -> Iterator[str]:
    """Components fit into the peak, allocated memory into reserved memory, and that into the device.

    `device_used` is read at the end, when part of the reserved peak may be free again: those two are not compared.
    """
    devices, parts = record.hardware.devices, record.memory.components.per_rank
    for number, rank in enumerate(record.memory.per_rank):
        sizes = {name: getattr(rank, f"{name}_bytes") for name in ("peak_allocated", "peak_reserved", "device_used")}
        sizes["the device"] = devices[number % len(devices)].memory_bytes if devices else None
        for less, more in NESTED:
            if None not in (sizes[less], sizes[more]) and sizes[less] > sizes[more]:
                yield f"rank {number}: {less} is {sizes[less]}, more than {more}, {sizes[more]}"
    for number, part in enumerate(parts):
        for when in ("at_peak", "after_step"):
            total, peak = sum((getattr(part, when) or {}).values()), part.tracked_peak_bytes
            if total > peak or (when == "at_peak" and part.at_peak is not None and total != peak):
                yield f"rank {number}: components {when} are {total}, but {peak} were tracked at the peak"
    for number, (part, rank) in enumerate(zip(parts, record.memory.per_rank, strict=False)):
        allocated = rank.peak_allocated_bytes
        if allocated and part.tracked_peak_bytes > (1 + PADDING) * allocated:
            yield f"rank {number}: {part.tracked_peak_bytes} were tracked, above the allocator's peak of {allocated}"
    yield from _host_memory(record)


def _host_memory(record: Record) -> Iterator[str]:
    """No process holds more than the host has. On a CPU it holds at least its tensors."""
    hosts = [record.hardware, *(machine.hardware for machine in record.machines)]
    host = max((each.host_memory_bytes or 0 for each in hosts), default=0)
    real = not record.is_virtual and record.requested.init != "none"
    parts = record.memory.components.per_rank
    for number, rank in enumerate(record.memory.per_rank):
        peak = rank.host_peak_bytes
        if peak and host and peak > host:
            yield f"rank {number}: host_peak is {peak}, more than the host's {host}"
        tracked = parts[number].tracked_peak_bytes if real and number < len(parts) else 0
        if peak and record.observed.device == "cpu" and tracked > (1 + PADDING) * peak:
            yield f"rank {number}: {tracked} were tracked, above the process's peak of {peak}"


def reports_of_all_ranks(record: Record) -> Iterator[str]:
    """Every rank has reported: the first rank need not hold the most."""
    ranks = 1 if record.is_virtual else record.observed.ranks
    reported = {
        "memory": record.memory.per_rank,
        "traffic": record.traffic.per_rank,
        "components": record.memory.components.per_rank,
        "held_parameters": record.observed.held_parameters_per_rank,
    }
    for name, values in reported.items():
        if values and len(values) != ranks:
            yield f"{name}: {len(values)} of {ranks} ranks have reported"


def replicas_and_sharing(record: Record) -> tuple[int, int]:
    """How many groups of ranks hold the same, and how many ranks a group has. Hybrid sharding has several groups."""
    mesh = (record.observed.fsdp or {}).get("mesh") or [[]]
    return tuple(mesh[0]) if len(mesh[0]) == 2 else (1, record.observed.ranks)


def held_parameters(record: Record, rank: int) -> int:
    """Parameters that a rank holds where layers are divided. A virtual run records those of the first rank only."""
    held = record.observed.held_parameters_per_rank
    return held[rank] if rank < len(held) else record.observed.parameters


def parameter_shares(record: Record) -> Iterator[str]:
    """Each rank holds its share of the parameters."""
    observed, count = record.observed, record.observed.parameters
    held_by_ranks = observed.held_parameters_per_rank
    if observed.fsdp:  # FSDP2 divides by rows, so the last ranks may have fewer
        replicas, sharing = replicas_and_sharing(record)
        if len(held_by_ranks) == observed.ranks and not same_elements(sum(held_by_ranks), count * replicas):
            yield f"the ranks hold {sum(held_by_ranks)} parameters together, but there are {count * replicas}"
        if held_by_ranks and not count / sharing <= max(held_by_ranks) + EXACT_ELEMENTS:
            yield f"no rank holds its share of {count / sharing:.0f} parameters"
    share, divided = count / observed.ranks if observed.stage == 3 else count, observed.tensor_ranks or 1
    for number, held in enumerate(held_by_ranks):
        if divided > 1:  # each rank has a part of the layers, and whole norms and embeddings
            if not count / divided <= held < count:
                between = f"not between {count / divided:.0f} and {count}"
                yield f"rank {number}: {held} parameters are held, {between}"
        elif not observed.fsdp and not same_elements(held, share):
            yield f"rank {number}: {held} parameters are held, but its share is {share:.0f}"


def state_shares(record: Record) -> Iterator[str]:
    """Each rank holds Adam's two moments, and the master weights, of its share of the parameters."""
    observed, trained = record.observed, record.observed.trained_parameters or record.observed.parameters
    divided = observed.tensor_ranks or 1
    for number, part in enumerate(record.memory.components.per_rank):
        share = trained / (observed.ranks if observed.stage else 1)
        if divided > 1:
            share = held_parameters(record, number) / (observed.ranks // divided)
        if observed.fsdp and observed.held_parameters_per_rank:
            # Of frozen and trained parameters, the record does not say which ones a rank holds.
            share = observed.held_parameters_per_rank[number] if trained == observed.parameters else math.nan
        for name, times in (("moments", 2), ("master", 1)):
            size_bytes = (part.at_peak or {}).get(name)  # None: on the disk, or the weights are their own master
            if not size_bytes or observed.dtypes.get(name) != "float32" or observed.optimizer not in ADAM:
                continue
            if not math.isnan(share) and not same_elements(size_bytes / 4 / times, share):
                yield f"rank {number}: {name} are {size_bytes} bytes, but its share is {4 * share * times:.0f}"
