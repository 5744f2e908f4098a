"""Reads named metrics from a record. Values of ranks become their maximum. Unknown is None."""

from collections.abc import Callable, Iterable
from types import NoneType, UnionType
from typing import Annotated, Union, get_args, get_origin

from pydantic import BaseModel

from study.errors import Stop
from study.records.schema import Collective, Record
from study.spec import node_traffic
from study.spec.validation import nearest

STATES = ("weights", "gradients", "master", "moments", "swap")
DTYPES = {8: ("float64", "int64"), 4: ("float32", "int32"), 2: ("bfloat16", "float16"), 1: ("uint8", "int8", "bool")}
ELEMENT_BYTES = {dtype: size_bytes for size_bytes, dtypes in DTYPES.items() for dtype in dtypes}
HIGHER_IS_BETTER = ("tokens_per_s", "samples_per_s", "mfu", "accuracy")
COMPONENT = "component."  # prefix of a component at the peak: component.weights


def gloo_wire_bytes(counts: dict[str, Collective], ranks: int) -> float | None:
    """The bytes that a rank writes to its sockets for these collectives with gloo, averaged over the ranks.

    The formulas are those of ring algorithms. Gloo runs a reduce-scatter as an all-reduce and keeps a part, so the wire
    carries twice the logical bytes. None if a collective has no formula: gloo's reduce, for example, sends between 1.5
    and 2.4 times the tensor at two ranks, depending on its size.
    """
    once, twice = ("all_gather", "broadcast", "all_to_all"), ("all_reduce", "reduce_scatter")
    factor = {"barrier": 0} | dict.fromkeys(once, 1) | dict.fromkeys(twice, 2)
    if not counts.keys() <= factor.keys():
        return None
    return sum(
        size * factor[kind] * (len(group) - 1) / len(group)
        for kind, count in counts.items()
        for group, size in count.by_ranks(ranks).items()
    )


def dig(value, path: str):
    """The value at a dotted path with list indices. None if this record has none; a Stop if no record can have it."""
    for name in path.split("."):
        if isinstance(value, list) and name.lstrip("-").isdigit():
            value = value[int(name)] if -len(value) <= int(name) < len(value) else None
        elif isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, BaseModel):
            if name not in type(value).model_fields:
                raise Stop(f"A record has no field {path!r}", nearest(name, type(value).model_fields))
            value = getattr(value, name)
        else:
            return None
    return value


def refuse_unknown(path: str) -> None:
    """A Stop for a path that no record can have, whatever is in its lists."""
    hint = Record
    for name in path.split("."):
        while get_origin(hint) in (Annotated, Union, UnionType):
            hint = next(each for each in get_args(hint) if each is not NoneType)
        if isinstance(hint, type) and issubclass(hint, BaseModel):
            if name not in hint.model_fields:
                raise Stop(f"A record has no field {path!r}", nearest(name, hint.model_fields))
            hint = hint.model_fields[name].annotation
        elif get_origin(hint) in (list, dict):
            hint = get_args(hint)[-1]
        elif hint is dict:
            return
        else:
            raise Stop(f"A record has no field {path!r}", f"leave out {name!r} and what follows it")


def most(values: Iterable[float | None]) -> float | None:
    """The maximum; None if one of the values is unknown."""
    values = list(values)
    return max(values) if values and None not in values else None


def _over_ranks(name: str) -> Callable[[Record], float | None]:
    return lambda record: most(getattr(rank, name) for rank in record.memory.per_rank)


def _at_peak(record: Record, *roles: str) -> float | None:
    """The bytes of these components at the peak."""
    ranks = [rank.at_peak for rank in record.memory.components.per_rank if rank.at_peak]
    return most(sum(rank.get(role, 0) for role in roles) for rank in ranks)


def _tracked(record: Record) -> float | None:
    return most(rank.tracked_peak_bytes for rank in record.memory.components.per_rank)


def _peak(record: Record) -> float | None:
    """The peak of the device's allocator; without a GPU, that of the tracked tensors."""
    return _over_ranks("peak_allocated_bytes")(record) or _tracked(record)


def _joules_per_step(record: Record) -> float | None:
    joules, steps = record.energy.joules_per_rank, record.energy.steps
    return sum(joules) / steps if steps and joules and None not in joules else None


# Each is the dotted path of a field, or a function.
TIMES = {
    "step_s": "time.median_step_s",
    "tokens_per_s": "time.tokens_per_s",
    "samples_per_s": "time.samples_per_s",
    "mfu": "time.mfu",
    "setup_s": "time.setup_s",
    "joules_per_step": _joules_per_step,
}
LOSSES = {
    "train_loss": "loss.final_train",
    "eval_loss": "loss.final_eval.eval_loss",
    "accuracy": "loss.final_eval.accuracy",
    "perplexity": "loss.final_eval.perplexity",
}
DEVICE_SIZES = (
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "host_peak_bytes",
    "nvme_written_bytes",
    "nvme_read_bytes",
)
SIZES = {
    "peak_bytes": _peak,
    "tracked_peak_bytes": _tracked,
    **{name: _over_ranks(name) for name in DEVICE_SIZES},
    "states_bytes": lambda record: _at_peak(record, *STATES),
    "parameters": "observed.parameters",
    "held_parameters": "observed.held_parameters",
    "saved_bytes": "observed.saved.bytes",
}
QUANTITIES = TIMES | LOSSES | SIZES
OF_A_TRAINING = {  # quantities of a training of the published script, as paths below `observed.runs`
    "training_s": "training_s",
    "train_loss": "losses.-1",
    "first_loss": "losses.0",
    "eval_loss": "evals.-1.eval_loss",
    "peak_bytes": "peak_bytes",
    "printed_peak_bytes": "printed_peak_bytes",
}


def sort_of(quantity: str) -> str:
    """Which kind of claim may rest on it: "time", "convergence", or "" for any."""
    last = quantity.rpartition(".")[2]
    if quantity in TIMES or quantity.startswith(("time.", "energy.")) or last.endswith(("_s", "_per_s")):
        return "time"
    if quantity in LOSSES or quantity.startswith("loss.") or "loss" in quantity:
        return "convergence"
    return ""


def unit_of(quantity: str) -> str:
    """The unit of a quantity or of a field by its dotted path; "number" if it has none."""
    parents, _, last = quantity.rpartition(".")
    if last.endswith("_per_s"):
        return "number"
    if last.endswith("bytes") or parents.endswith(("component", "at_peak", "after_step")):
        return "bytes"
    return "s" if last.endswith("_s") else "parameters" if last.endswith("parameters") else "number"


def value(record: Record, quantity: str, training: int | None = None) -> float | None:
    """A quantity of a record, by its name or its dotted path."""
    if training is not None:
        if quantity not in OF_A_TRAINING:
            raise Stop(f"A training of the script has no {quantity!r}", nearest(quantity, OF_A_TRAINING))
        return dig(record, f"observed.runs.{training}.{OF_A_TRAINING[quantity]}")
    if record.checkpoints.resumes and quantity in TIMES:
        return None  # they cover only the part after an interruption, so they are not comparable
    if quantity.startswith(COMPONENT):
        return _at_peak(record, quantity.removeprefix(COMPONENT))
    source = QUANTITIES.get(quantity, quantity)
    if callable(source):
        return source(record)
    if quantity not in QUANTITIES and ("." not in quantity or quantity.startswith("time.")):
        # A part of a step is not a step: DeepSpeed's autotuner once took a timer of the forward pass for one.
        raise Stop(f"There is no quantity {quantity!r}", nearest(quantity, (*QUANTITIES, f"{COMPONENT}weights")))
    return dig(record, source)


def curve(record: Record, training: int | None = None) -> list[float] | None:
    """The training losses step by step, as far as they were recorded."""
    return (record.loss.train or None) if training is None else dig(record, f"observed.runs.{training}.losses")


def moved(record: Record, collectives: list[str] | None, unit: str, node_ranks: int | None = None) -> float | None:
    """The amount that collectives moved in a step, on the rank that moved most. In "volume" an all-reduce counts twice.

    With `node_ranks` ranks in a node, only collectives between nodes count.
    """

    def of(kind: str, entry: Collective) -> float:
        if unit == "calls":
            return entry.calls
        size = entry.bytes
        if node_ranks:
            split = node_traffic.by_node({kind: entry.by_ranks(record.observed.ranks)}, node_ranks)
            size = split["between"].get(kind, 0)
        return size * (2 if unit == "volume" and kind == "all_reduce" else 1)

    return most(
        sum(of(kind, entry) for kind, entry in counts.items() if collectives is None or kind in collectives)
        for counts in record.traffic.per_rank
    )


def weight_bytes(record: Record) -> float | None:
    """Bytes of all weights, in their observed dtype."""
    size, dtype = record.observed.parameters, record.observed.dtypes.get("weights")
    return size * ELEMENT_BYTES[dtype] if size and dtype in ELEMENT_BYTES else None
