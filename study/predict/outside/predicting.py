"""What we predict of a measured training: the bytes of a GPU at the peak, and the seconds of a step.

A training is a published row, or a line of a small CSV file of your own measurements.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from study.core.errors import Stop
from study.core.gpus import GPUS, gpu_named
from study.core.numbers import short, signed
from study.predict.architecture import named
from study.predict.estimate import estimate
from study.predict.memory.memory_kinds import memory_kinds
from study.predict.outside.described import NotPredicted, Training, timed_setup, training_of
from study.predict.outside.published import Count, Measured, MemoryKind, Precision, Quantity, Row, read
from study.predict.setup import Setup
from study.predict.step_time import Machine, step_time

FLAT_MFU = 0.4  # a common assumption: this share of the peak, for the operations without recomputation
SCALES = {"memory_gb": 1e9, "step_s": 1.0}
DEFAULTS = (
    "Assumed of every line: all weights train, attention is sdpa, AdamW is fused, the loss needs all logits at once, "
    "nothing is compiled, and the GPUs have the usual links of their kind, eight to a node. Where the file has no "
    "value: one pass in a step, no recomputation, and memory as PyTorch's allocated bytes."
)


@dataclass(frozen=True)
class Predicted:
    """Bytes or seconds, the ends of their interval, and seconds at a flat share of the peak."""

    value: float
    low: float | None = None
    high: float | None = None
    flat: float | None = None


def of_row(row: Row) -> dict[Quantity, Predicted]:
    """Return the predictions of what a row measured. What is refused is missing."""
    predicted: dict[Quantity, Predicted] = {}
    for quantity in row.measured:
        with suppress(NotPredicted, Stop):
            training = training_of(row)
            predicted[quantity] = _memory(training) if quantity == "memory" else _time(training)
    return predicted


def _memory(training: Training) -> Predicted:
    row, setup = training.row, training.setup
    if row.products and "torchao" not in row.libraries:  # torchao keeps what 16-bit products keep
        raise NotPredicted("what is kept of 8-bit products depends on the library")
    if setup.fsdp and setup.tensor_ranks > 1:
        raise NotPredicted("what ranks hold that also divide layers is not known for FSDP")
    return memory(setup, row.kind, row.gpu_name)


def _time(training: Training) -> Predicted:
    if training.machine is None:
        raise NotPredicted(training.row.not_predicted)
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


class Measurement(BaseModel, frozen=True):
    """A training with an arm of this study, and what you measured of it."""

    model: str  # a built-in shape, a folder with config.json, or a model on the hub
    gpu: str
    gpus: Count
    arm: str  # a file of accelerate_configs/
    tokens: Count  # of a row
    rows: Count  # of a GPU and pass
    precision: Precision
    passes: int = Field(1, ge=1)  # of a step
    recompute: bool = False
    memory_kind: MemoryKind = "allocated"
    memory_gb: Measured = None  # 10^9 bytes
    step_s: Measured = None


def compared(path: Path) -> list[dict]:
    """Return a line for each measured number of a file, with its prediction; or why there is none."""
    lines = []
    for one in read(path, Measurement):
        for name, scale in SCALES.items():
            if measured := getattr(one, name):
                line = {"model": one.model, "arm": one.arm, "on": f"{one.gpus} x {one.gpu}", "quantity": name}
                lines.append(line | {"measured": measured} | _beside(one, measured, scale))
    return lines


def _beside(one: Measurement, measured: float, scale: float) -> dict:
    """Return a prediction as columns: the number, how far off it is, and its interval."""
    try:
        machine = Machine(gpu=gpu_named(one.gpu), gpus_per_node=min(one.gpus, 8))
        how: dict[str, Any] = {
            "sequence": one.tokens,
            "micro_batch": one.rows,
            "accumulation": one.passes,
            "ranks": one.gpus,
        }
        how |= {"checkpointing": one.recompute, "precision": one.precision, "device": "cuda"}
        setup = Setup.of_arm(named(one.model), one.arm, **how)
        predicted = step(setup, machine) if scale == 1 else memory(setup, one.memory_kind, machine.gpu)
    except (NotPredicted, Stop) as reason:
        return {"predicted": None, "off": str(reason)}
    value = predicted.value / scale
    ends = f"{short(predicted.low)} to {short(predicted.high)}" if predicted.low else None
    return {"predicted": value, "off": signed(value / measured - 1), "interval": ends}
