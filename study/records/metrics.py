"""Computes and reads the quantities of a record. Values of ranks become their maximum. Unknown is None."""

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from study.core import gpus
from study.core.files import value_at
from study.records.schema import Record

STATES = ("weights", "gradients", "master", "moments", "swap")
ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int8": 1}


# --- arithmetic with unknown values: the result is unknown too, because that of the rest would hide it -------------


def all_known(values: Iterable[Any]) -> list[Any]:
    """Return the values; none of them if one is unknown."""
    known = [*values]
    return [] if None in known else known


def most(values: Iterable[float | None]) -> float | None:
    return max(all_known(values), default=None)


def median(values: Iterable[float | None]) -> float | None:
    known = all_known(values)
    if not known:
        return None
    return statistics.median(known)


def over(above: float | None, below: float | None) -> float | None:
    """Return a quotient; unknown also if one of the two is 0, because then nothing was measured."""
    return above / below if above and below else None


def product(first: float | None, second: float | None) -> float | None:
    return first * second if first and second else None  # a factor of 0 is as good as unknown here, too


# --- times and rates -----------------------------------------------------------------------------------------------


def steps_per_s(record: Record) -> float | None:
    """Return timed steps per second of wall time."""
    # Records before measure version 3 have no window. In them, as then, the slowest rank's steps are added up.
    return over(len(record.time.step_s), record.time.window_s or sum(record.time.step_s))


def tokens_per_s(record: Record) -> float | None:
    """Return tokens of all ranks per second."""
    if record.is_virtual:  # no real group would be as fast as a rank that waits for nobody
        return None
    return product(record.observed.tokens_per_step, steps_per_s(record))


def flops_per_s(record: Record) -> float | None:
    """Return the model's operations that a rank did per second: recomputed activations do not count."""
    return product(record.time.flops_per_rank_and_step, steps_per_s(record))


def peak_flops_per_s(record: Record) -> float | None:
    """Return the dense peak of the run's GPU in its precision, by the datasheet. None without a known GPU."""
    requested = record.requested
    if requested.precision is None:
        return None
    name = value_at(record, "hardware.devices.0.name")
    return gpus.peak_flops(name, requested.precision, requested.tf32 is not False)


# --- losses --------------------------------------------------------------------------------------------------------


def final_train_loss(record: Record) -> float | None:
    losses = record.loss.train
    # A user's own script may stop saying its losses before it stops training.
    if record.is_watched and len(losses) != record.observed.steps:
        return None
    return value_at(losses, "-1")


# --- sizes ---------------------------------------------------------------------------------------------------------


def _at_peak(record: Record, *roles: str) -> float | None:
    """Return bytes of these components at the peak, on the rank that has most of them."""
    known = [rank.at_peak for rank in record.memory.components.per_rank if rank.at_peak]  # others were not told apart
    return max((sum(held.get(role, 0) for role in roles) for held in known), default=None)


def components(record: Record) -> dict[str, int]:
    """Return bytes by component at the peak of the rank that held most; empty without instruments."""
    ranks = [(rank.tracked_peak_bytes, rank.at_peak) for rank in record.memory.components.per_rank if rank.at_peak]
    _, held = max(ranks, key=lambda rank: rank[0], default=(0, {}))
    return held


# --- traffic -------------------------------------------------------------------------------------------------------


def sent(record: Record) -> dict[str, int]:
    """Return bytes of a step by collective, of the first rank; empty without instruments."""
    return {kind: count.bytes for counts in record.traffic.per_rank[:1] for kind, count in counts.items()}


def between_nodes(groups: dict[tuple[int, ...], int], node_ranks: int) -> int:
    """Return the bytes of groups that have ranks in several nodes, which ranks fill one after another.

    As in papers, all bytes of such a group count.
    """
    return sum(size for ranks, size in groups.items() if min(ranks) // node_ranks < max(ranks) // node_ranks)


def moved(record: Record, collectives: list[str] | None, unit: str, node_ranks: int | None = None) -> float | None:
    """Return the bytes that collectives moved in a step, on the rank that moved most.

    `unit` is "tensors" or "volume". With `node_ranks` ranks in a node, only bytes between nodes count.
    """
    totals: list[float] = []
    for counts in record.traffic.per_rank:
        chosen = {kind: counts[kind] for kind in collectives or counts if kind in counts}
        sizes_bytes: dict[str, float] = {kind: count.bytes for kind, count in chosen.items()}
        if node_ranks:
            ranks = record.observed.ranks or 1
            sizes_bytes = {kind: between_nodes(count.by_ranks(ranks), node_ranks) for kind, count in chosen.items()}
        # As the papers count volume: an all-reduce is a reduce-scatter and an all-gather, so its tensor moves twice.
        # What gloo sends is no measure of that: its reduce-scatter is an all-reduce, so stage 3 with two gathers sends
        # 4.0 times the weights where a ring would send 3, measured.
        if unit == "volume":
            sizes_bytes["all_reduce"] = 2 * sizes_bytes.get("all_reduce", 0)
        totals.append(sum(sizes_bytes.values()))
    return max(totals, default=None)


# --- by name -------------------------------------------------------------------------------------------------------

Quantity = Callable[[Record], float | None] | str  # computed, or the path of a measured one
QUANTITIES: dict[str, Quantity] = {
    "step_s": lambda record: median(record.time.step_s),
    "tokens_per_s": tokens_per_s,
    # The share of the datasheet's peak that the model's own operations reach.
    "mfu": lambda record: over(flops_per_s(record), peak_flops_per_s(record)),
    "train_loss": final_train_loss,
    "eval_loss": "loss.eval.-1.eval_loss",
    "accuracy": "loss.eval.-1.accuracy",
    "perplexity": "loss.eval.-1.perplexity",
    # The peak of the device's allocator; without a GPU, that of the tracked tensors.
    "peak_bytes": lambda record: value(record, "peak_allocated_bytes") or value(record, "tracked_peak_bytes"),
    # The peak of the tensors, which formulas predict.
    "tracked_peak_bytes": lambda record: most(rank.tracked_peak_bytes for rank in record.memory.components.per_rank),
    "peak_allocated_bytes": lambda record: most(rank.peak_allocated_bytes for rank in record.memory.per_rank),
    "host_peak_bytes": lambda record: most(rank.host_peak_bytes for rank in record.memory.per_rank),
    # What the kernel counted that a rank wrote in a step, nearly all of it to gloo's sockets.
    "socket_bytes": lambda record: most(record.traffic.kernel_bytes_written),
    "states_bytes": lambda record: _at_peak(record, *STATES),
    "parameters": "observed.parameters",
    # Of all weights, in their observed dtype.
    "weight_bytes": lambda record: product(
        record.observed.parameters, ELEMENT_BYTES.get(str(record.observed.dtypes.get("weights")))
    ),
}
# Of the timed steps.
OF_THE_WHOLE = ("step_s", "tokens_per_s", "mfu", "peak_bytes", "peak_allocated_bytes", "host_peak_bytes")
OF_A_TRAINING = {  # quantities of a training of the published script, as paths below `observed.runs`
    "training_s": "training_s",
    "train_loss": "losses.-1",
    "eval_loss": "evals.-1.eval_loss",
    "peak_bytes": "peak_bytes",
}


def value(record: Record, quantity: str, training: int | None = None) -> Any:
    """Return a quantity of a record by its name or dotted path; with `training`, of one that the script ran."""
    if training is not None:
        return value_at(record, f"observed.runs.{training}.{OF_A_TRAINING[quantity]}")
    # Those of a run that was resumed cover only the part after an interruption, so they are not comparable.
    if quantity in OF_THE_WHOLE and record.checkpoints.get("resumes"):
        return None
    if quantity.startswith("component."):
        return _at_peak(record, quantity.removeprefix("component."))
    how = QUANTITIES.get(quantity, quantity)
    return how(record) if callable(how) else value_at(record, how)
