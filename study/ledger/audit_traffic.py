"""Audit of a record's traffic: the collectives are those of one step of the arm, and kernel and links saw them."""

from collections.abc import Iterable, Iterator

from study.ledger.audit_memory import held_parameters, replicas_and_sharing
from study.ledger.tolerances import PADDING, same_elements
from study.records.metrics import ELEMENT_BYTES, timed_s, wire_bytes_per_rank
from study.records.schema import Record

SMALL_ELEMENTS = 100_000  # a tolerance for small collectives besides weights and gradients
KERNEL, LOG_LINES_BYTES = 0.02, 2**16  # tolerances of the kernel's count, which includes frames and log lines
LINK, HEADERS = 0.02, 0.1  # tolerances of an emulated link: a burst at the start; headers and acknowledgements
MUON_GATHERS = 6  # stage 3: whole gradients and momenta, and both again for each matrix, padded in its round
GRADIENTS, WEIGHTS = ("all_reduce", "reduce_scatter", "reduce"), ("all_gather", "broadcast")  # collectives of each


def counts(record: Record) -> Iterator[str]:
    """The bytes are those of a single step, which reduces gradients and gathers weights only so often."""
    observed, whole = record.observed, _gathered_elements(record)
    reduced, gathered = _times_in_a_step(record)
    trained = observed.trained_parameters
    if trained in (None, observed.parameters):  # FSDP2's with their padding
        trained = whole
    for number, collectives in enumerate(record.traffic.per_rank):
        for kind, moved in collectives.items():
            if moved.bytes != (total := sum(moved.bytes_by_dtype.values())):
                yield f"rank {number}: {kind} moved {moved.bytes} bytes, but {total} by dtype"
        gradients, weights = _elements(collectives, GRADIENTS), _elements(collectives, WEIGHTS)
        if observed.tensor_ranks:  # sums of activations, and gathered logits, come on top of what is counted here
            least = reduced * held_parameters(record, number)
            if gradients < least * (1 - PADDING) - SMALL_ELEMENTS:
                yield f"rank {number}: fewer than the {least:.0f} elements of its gradients were reduced"
            continue
        if weights > gathered * whole * (1 + PADDING) + SMALL_ELEMENTS:
            words = f"{weights / whole:.3g} elements a parameter, more often than in a step"
            yield f"rank {number}: {', '.join(WEIGHTS)} moved {words}"
        expected = reduced * trained
        if not same_elements(gradients, expected) and (observed.ranks > 1 or gradients > expected):
            often = "more often" if gradients > expected else "less often"
            words = f"{gradients / trained:.3g} elements a parameter, {often} than in a step"
            yield f"rank {number}: {', '.join(GRADIENTS)} moved {words}"
    steps, timed = record.energy.steps, len(record.time.step_s)
    if steps is not None and timed and steps != timed:
        yield f"energy is of {steps} steps, but {timed} were timed"


def _times_in_a_step(record: Record) -> tuple[float, int]:
    """How often a step reduces each gradient and gathers each weight."""
    passes, stage, fsdp = record.requested.accumulation, record.observed.stage or 0, record.observed.fsdp
    reduced, gathered = passes if stage > 1 else 1, 1
    if stage == 3:  # for each forward and each backward pass, and once after the update
        gathered = 2 * passes + 1
    if fsdp:  # not after the update; through Accelerate it reduces in the last pass of a step alone
        gathered = 2 * passes
    replicas, sharing = replicas_and_sharing(record)
    if replicas > 1:  # each rank's part, between the groups
        reduced += 1 / sharing
    if record.requested.optimizer == "muon" and stage == 3:
        gathered += MUON_GATHERS
    return reduced, gathered


def _gathered_elements(record: Record) -> int:
    """Elements of all parameters as collectives move them.

    FSDP2 pads the first dimension of each to a multiple of the ranks that share it, and the first rank holds a whole
    part.
    """
    held, observed = record.observed.held_parameters_per_rank, record.observed
    return held[0] * replicas_and_sharing(record)[1] if observed.fsdp and held else observed.parameters


def _elements(collectives: dict, kinds: Iterable[str]) -> float:
    """Elements that collectives of these kinds moved."""
    dtypes = (collectives[kind].bytes_by_dtype for kind in kinds if kind in collectives)
    return sum(sum(size / ELEMENT_BYTES.get(dtype, 1) for dtype, size in sizes.items()) for sizes in dtypes)


def collectives_of_the_stage(record: Record) -> Iterator[str]:
    """The collectives are those of the stage, in the dtypes of the weights and gradients."""
    observed, stage = record.observed, record.observed.stage
    trained = observed.trained_parameters or observed.parameters
    for number, seen in enumerate(record.traffic.per_rank):
        elements = _elements(seen, WEIGHTS)
        if empty := [kind for kind, each in seen.items() if each.bytes and not each.calls]:
            yield f"rank {number}: {empty[0]} moved bytes without a call"
        if observed.wrapper == "DistributedDataParallel" and elements > observed.parameters / 2:
            yield f"rank {number}: DDP gathers no weights, but {elements:.0f} elements were gathered"
        if observed.tensor_ranks:
            continue  # between two ranks nothing but logits is gathered
        if stage in (1, 2) and observed.ranks > 1 and not same_elements(elements, trained):
            yield f"rank {number}: stage {stage} gathers {trained} elements after a step, not {elements:.0f}"
        scatters = (stage == 3 and record.requested.optimizer != "muon") or observed.fsdp  # Muon takes whole gradients
        if scatters and "reduce_scatter" not in seen:
            yield f"rank {number}: stage 3 and FSDP scatter gradients, but no reduce_scatter was seen"
        gathered = [seen[kind].bytes_by_dtype for kind in WEIGHTS if kind in seen]
        sizes = [(size, dtype) for by_dtype in gathered for dtype, size in by_dtype.items()]
        if stage in (1, 2) and sizes and max(sizes)[1] != observed.dtypes.get("weights"):
            yield f"rank {number}: the weights are {observed.dtypes.get('weights')}, but {max(sizes)[1]} was gathered"


def kernel(record: Record) -> Iterator[str]:
    """The kernel saw at least the counted bytes written, and not many more."""
    pairs = zip(record.traffic.kernel_bytes_written, wire_bytes_per_rank(record), strict=False)
    for number, (written, counted) in enumerate(pairs):
        if written is None or not counted:
            continue
        if not (1 - KERNEL) * counted <= written <= (1 + KERNEL) * counted + LOG_LINES_BYTES:
            yield f"rank {number}: {counted:.4g} bytes were counted, but the kernel saw {written:.4g} written"


def links(record: Record) -> Iterator[str]:
    """An emulated link carried no more than its bandwidth allows, and not much more than its ranks sent."""
    seen, moved, hosts = record.observed.network, record.traffic, record.requested.hosts
    if hosts and (seen is None or seen.hosts != hosts or len(moved.per_link) != hosts or not moved.link_steps):
        yield f"{hosts} emulated hosts were requested, but the record does not have the links of so many"
        return
    took_s, sent_by_ranks = timed_s(record) or 0, [sent for sent in wire_bytes_per_rank(record) if sent is not None]
    for number, link in enumerate(moved.per_link):
        carried_mbit = link.sent_bytes * 8e-6
        if seen and seen.bandwidth_mbit and carried_mbit > (1 + LINK) * seen.bandwidth_mbit * took_s:
            yield f"link {number}: {carried_mbit:.4g} Mbit in {took_s:.4g} s, but it has {seen.bandwidth_mbit} Mbit/s"
        if sent_by_ranks and link.sent_bytes / moved.link_steps > (1 + HEADERS) * sum(sent_by_ranks):
            yield f"link {number}: {link.sent_bytes / moved.link_steps:.4g} bytes a step are more than all ranks sent"
