"""Computes and reads the quantities of a record. A record holds what was measured; all else is computed here.

Values of ranks become their maximum. Unknown is None.
"""

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from study.core import gpus
from study.core.errors import Stop, nearest
from study.records.schema import Collective, Record

STATES = ("weights", "gradients", "master", "moments", "swap")
ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int8": 1}


# --- times and rates -----------------------------------------------------------------------------------------------


def over(above: float | None, below: float | None) -> float | None:
    """Return a quotient; None if one of the two is unknown, or nothing."""
    if above and below:
        return above / below
    return None


def timed_s(record: Record) -> float | None:
    """Return the seconds that rates divide by: before measure version 3, the sum of the slowest rank's steps."""
    if record.time.window_s is not None:
        return record.time.window_s
    return sum(record.time.step_s) or None


def median_step_s(record: Record) -> float | None:
    """Return the median seconds of the timed steps."""
    if not record.time.step_s:
        return None
    return statistics.median(record.time.step_s)


def steps_per_s(record: Record) -> float | None:
    """Return the timed steps per second of wall time."""
    return over(len(record.time.step_s), timed_s(record))


def tokens_per_s(record: Record) -> float | None:
    """Return the tokens of all ranks per second. None for a virtual run: no real group would be as fast."""
    speed = steps_per_s(record)
    if speed is None or record.is_virtual:
        return None
    per_step: float | None = record.observed.tokens_per_step
    if record.watched.timed_tokens is not None:  # a user's own loop may have steps of unequal size
        per_step = record.watched.timed_tokens / len(record.time.step_s)
    if per_step is None:
        return None
    return per_step * speed


def flops_per_s(record: Record) -> float | None:
    """Return the operations of the model that a rank did per second."""
    speed = steps_per_s(record)
    flops = record.time.flops_per_rank_and_step
    return flops * speed if flops and speed else None


def peak_flops_per_s(record: Record) -> float | None:
    """Return the dense peak of the run's GPU in its precision, by the datasheet. None without a known GPU."""
    devices = record.hardware.devices
    requested = record.requested
    if not devices or requested.precision is None:
        return None
    return gpus.peak_flops(devices[0].name, requested.precision, requested.tf32 is not False)


def mfu(record: Record) -> float | None:
    """Return the share of the datasheet's peak that the model's own operations reach."""
    return over(flops_per_s(record), peak_flops_per_s(record))


# --- losses --------------------------------------------------------------------------------------------------------


def final_train_loss(record: Record) -> float | None:
    """Return the loss of the last step. None if the losses of a user's own script end before its steps."""
    losses = record.loss.train
    if not losses or (record.is_watched and len(losses) != record.observed.steps):
        return None
    return losses[-1]


# --- sizes ---------------------------------------------------------------------------------------------------------


def all_known(values: Iterable[Any]) -> list[Any]:
    """Return the values; none of them if one is unknown."""
    known = [*values]
    return [] if None in known else known


def most(values: Iterable[float | None]) -> float | None:
    """Return the maximum; None if one of the values is unknown."""
    return max(all_known(values), default=None)


def _at_peak(record: Record, *roles: str) -> float | None:
    """Return the bytes of these components at the peak."""
    ranks = [rank.at_peak for rank in record.memory.components.per_rank if rank.at_peak]
    return most(sum(rank.get(role, 0) for role in roles) for rank in ranks)


def fullest_rank(record: Record) -> int | None:
    """Return the rank that held most at its peak; None without instruments."""
    ranks = {number: rank for number, rank in enumerate(record.memory.components.per_rank) if rank.at_peak}
    # A rank whose components sum to its peak comes before one with a gap.
    exact = [number for number, rank in ranks.items() if sum((rank.at_peak or {}).values()) == rank.tracked_peak_bytes]
    return max(exact or ranks, key=lambda number: ranks[number].tracked_peak_bytes, default=None)


def components(record: Record) -> dict[str, int]:
    """Return the bytes by component at the peak of the rank that held most; empty without instruments."""
    number = fullest_rank(record)
    if number is None:
        return {}
    rank = record.memory.components.per_rank[number]
    held = dict(rank.at_peak or {})
    if rest_bytes := rank.tracked_peak_bytes - sum(held.values()):
        held["not told apart"] = rest_bytes
    return held


def tracked_peak_bytes(record: Record) -> float | None:
    """Return the peak of the tensors, which formulas predict."""
    return most(rank.tracked_peak_bytes for rank in record.memory.components.per_rank)


def peak_allocated_bytes(record: Record) -> float | None:
    """Return the peak of the device's allocator. None without a GPU."""
    return most(rank.peak_allocated_bytes for rank in record.memory.per_rank)


def peak_bytes(record: Record) -> float | None:
    """Return the peak of the device's allocator; without a GPU, that of the tracked tensors."""
    return peak_allocated_bytes(record) or tracked_peak_bytes(record)


def peak_of(record: Record) -> str | None:
    """Return whose peak `peak_bytes` is. allocated: by PyTorch on a GPU. tracked: held by tensors on a CPU."""
    if peak_allocated_bytes(record):
        return "allocated"
    if tracked_peak_bytes(record):
        return "tracked"
    return None


def weight_bytes(record: Record) -> float | None:
    """Return the bytes of all weights, in their observed dtype."""
    element_bytes = ELEMENT_BYTES.get(str(record.observed.dtypes.get("weights")))
    if element_bytes is None or record.observed.parameters is None:
        return None
    return record.observed.parameters * element_bytes


# --- traffic -------------------------------------------------------------------------------------------------------


def gloo_wire_bytes(counts: dict[str, Collective], ranks: int) -> float | None:
    """Return the bytes that a rank writes to its sockets for these collectives with gloo, averaged over the ranks.

    The formulas are those of ring algorithms. Gloo runs a reduce-scatter as an all-reduce and keeps a part, so the wire
    carries twice the logical bytes. None if a collective has no formula: gloo's reduce, for example, sends between 1.5
    and 2.4 times the tensor at two ranks, depending on its size.
    """
    factor = {"barrier": 0, "all_gather": 1, "broadcast": 1, "all_to_all": 1, "all_reduce": 2, "reduce_scatter": 2}
    if not counts.keys() <= factor.keys():
        return None
    return sum(
        size * factor[kind] * (len(group) - 1) / len(group)
        for kind, count in counts.items()
        for group, size in count.by_ranks(ranks).items()
    )


def sent(record: Record) -> dict[str, int]:
    """Return the bytes of a step by collective, of the first rank."""
    first, *_ = [*record.traffic.per_rank, {}]
    return {kind: count.bytes for kind, count in first.items()}


def wire_bytes_per_rank(record: Record) -> list[float | None]:
    """Return what each rank should write to its sockets in a step, by the formulas. None without gloo."""
    observed = record.observed
    if observed.backend != "gloo" or observed.ranks is None:
        return [None for _ in record.traffic.per_rank]
    return [gloo_wire_bytes(counts, observed.ranks) for counts in record.traffic.per_rank]


def moved(record: Record, collectives: list[str] | None, unit: str, node_ranks: int | None = None) -> float | None:
    """Return the amount that collectives moved in a step, on the rank that moved most.

    In "volume" an all-reduce counts twice. With `node_ranks` ranks in a node, only collectives between nodes count.
    """

    def amount(kind: str, entry: Collective) -> float:
        if unit == "calls":
            return entry.calls
        size: float = entry.bytes
        if node_ranks:
            groups = {ranks: float(part) for ranks, part in entry.by_ranks(record.observed.ranks or 1).items()}
            size = gpus.by_node({kind: groups}, node_ranks)["between"].get(kind, 0)
        if unit == "volume" and kind == "all_reduce":
            return 2 * size
        return size

    return most(
        sum(amount(kind, entry) for kind, entry in counts.items() if collectives is None or kind in collectives)
        for counts in record.traffic.per_rank
    )


# --- by name -------------------------------------------------------------------------------------------------------

Quantity = Callable[[Record], float | None]
TIMES: dict[str, Quantity] = {"step_s": median_step_s, "tokens_per_s": tokens_per_s, "mfu": mfu}
QUANTITIES: dict[str, Quantity] = TIMES | {
    "train_loss": final_train_loss,
    "eval_loss": lambda record: dig(record, "loss.eval.-1.eval_loss"),
    "accuracy": lambda record: dig(record, "loss.eval.-1.accuracy"),
    "perplexity": lambda record: dig(record, "loss.eval.-1.perplexity"),
    "peak_bytes": peak_bytes,
    "tracked_peak_bytes": tracked_peak_bytes,
    "peak_allocated_bytes": peak_allocated_bytes,
    "host_peak_bytes": lambda record: most(rank.host_peak_bytes for rank in record.memory.per_rank),
    "states_bytes": lambda record: _at_peak(record, *STATES),
    "parameters": lambda record: record.observed.parameters,
}
OF_A_TRAINING = {  # quantities of a training of the published script, as paths below `observed.runs`
    "training_s": "training_s",
    "train_loss": "losses.-1",
    "eval_loss": "evals.-1.eval_loss",
    "peak_bytes": "peak_bytes",
}


def value(record: Record, quantity: str, training: int | None = None) -> Any:
    """Return a quantity of a record, by its name or its dotted path."""
    if training is not None:
        if quantity not in OF_A_TRAINING:
            raise Stop(f"A training of the script has no {quantity!r}", nearest(quantity, OF_A_TRAINING))
        return dig(record, f"observed.runs.{training}.{OF_A_TRAINING[quantity]}")
    refuse_unknown(quantity)
    if record.checkpoints.get("resumes") and (quantity in TIMES or quantity.startswith(("time.", "energy."))):
        return None  # they cover only the part after an interruption, so they are not comparable
    if quantity.startswith("component."):
        return _at_peak(record, quantity.removeprefix("component."))
    if quantity in QUANTITIES:
        return QUANTITIES[quantity](record)
    return dig(record, quantity)


def refuse_unknown(quantity: str) -> None:
    """Raise Stop for a name that is no quantity, and for a path to a field that no record has."""
    section, _, path = quantity.partition(".")
    if quantity in QUANTITIES or section == "component":
        return
    known = {name: field.annotation for name, field in Record.model_fields.items() if name != "time"}
    if not path or section not in known:
        # A part of a step is not a step: DeepSpeed's autotuner once took a timer of the forward pass for one.
        raise Stop(f"there is no quantity {quantity!r}", nearest(quantity, (*QUANTITIES, "component.weights")))
    fields = getattr(known[section], "model_fields", {})
    if path.partition(".")[0] not in fields:
        raise Stop(f"a record has no field {quantity!r}", nearest(path, fields))


def dig(content: Any, path: str) -> Any:
    """Return the value at a dotted path with list indices, or None if this record has none."""
    for name in path.split("."):
        try:
            if isinstance(content, list):
                content = content[int(name)]
            elif isinstance(content, dict):
                content = content[name]
            else:
                content = getattr(content, name)
        except (LookupError, ValueError, AttributeError):
            return None  # an older record lacks a newer field, and a run of two ranks has no third
    return content
