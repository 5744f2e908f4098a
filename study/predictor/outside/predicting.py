"""What we predict of a published row: the bytes of a GPU at the peak, and the seconds of a step."""

from dataclasses import dataclass, replace

from study.errors import Stop
from study.machine.gpus import GPUS
from study.predictor.estimate import estimate
from study.predictor.memory.memory_kinds import memory_kinds
from study.predictor.outside.described import NotPredicted, Training, timed_setup, training_of
from study.predictor.outside.published import MemoryKind, Quantity, Row
from study.predictor.setup import Setup
from study.predictor.step_time import Machine, step_time

FLAT_MFU = 0.4  # a common assumption: this share of the peak, for the operations without recomputation


@dataclass(frozen=True)
class Predicted:
    """Bytes or seconds, the ends of their interval, and seconds at a flat share of the peak."""

    value: float
    low: float | None = None
    high: float | None = None
    flat: float | None = None


def of_row(row: Row) -> tuple[dict[Quantity, Predicted], str | None]:
    """Return the predictions of what a row measured, and why others are missing."""
    predicted: dict[Quantity, Predicted] = {}
    reasons = {}
    functions = {"memory": _memory, "time": _time}
    for quantity in row.measured:
        try:
            predicted[quantity] = functions[quantity](training_of(row))
        except (NotPredicted, Stop) as reason:
            reasons[str(reason)] = quantity
    return predicted, "; ".join(reasons) or None


def _memory(training: Training) -> Predicted:
    row, setup = training.row, training.setup
    if row.products and "torchao" not in row.libraries:  # torchao keeps what 16-bit products keep
        raise NotPredicted("what is kept of 8-bit products depends on the library")
    if setup.fsdp and setup.tensor_ranks > 1:
        raise NotPredicted("what ranks hold that also divide layers is not known for FSDP")
    return memory(setup, row.kind, training.machine.gpu if training.machine else None)


def _time(training: Training) -> Predicted:
    row = training.row
    if training.machine is None:
        raise NotPredicted(row.not_predicted or f"the GPU {row.gpu_name or row.gpu} is not known")
    setup = timed_setup(training)
    sharing = setup.sequence_ranks * setup.tensor_ranks
    flops = setup.model.flops_per_row(setup.sequence) * setup.micro_batch * setup.accumulation / sharing
    peak = GPUS[training.machine.gpu].flops_per_s(not setup.has_half_products)
    return replace(step(setup, training.machine), flat=flops / (FLAT_MFU * peak))


def memory(setup: Setup, kind: MemoryKind | None, gpu: str | None) -> Predicted:
    """Return the bytes of a kind. An unsaid kind is taken as allocated, and may be any of the three."""
    if kind == "allocated":
        return Predicted(estimate(setup).peak_bytes)
    kinds = memory_kinds(setup, gpu)
    value = getattr(kinds, kind or "allocated")
    if value is None:
        raise NotPredicted(f"{kind} memory is not known for ranks that divide a model")
    most = kinds.driver or (gpu and GPUS[gpu].memory_bytes)
    return Predicted(value) if kind or not most else Predicted(value, kinds.allocated, most)


def step(setup: Setup, machine: Machine) -> Predicted:
    """Return the seconds of a step."""
    time = step_time(setup, machine)
    return Predicted(time.seconds, time.low_s, time.high_s)
