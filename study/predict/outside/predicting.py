"""What we predict of a measured training: the bytes of a GPU at the peak, and the seconds of a step.

A training is a published row, or a line of a small CSV file of your own measurements.
"""

import functools
import json
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from study.core.errors import Stop
from study.core.gpus import GPUS, gpu_named
from study.core.text import percent, short
from study.predict.architecture import named
from study.predict.estimate import estimate
from study.predict.memory.memory_kinds import memory_kinds
from study.predict.outside.published import FOLDER, Count, Measured, MemoryKind, Precision, Quantity, Row, read
from study.predict.setup import Library, Setup
from study.predict.step_time import Machine, step_time
from study.predict.trace.transformer import Transformer


@dataclass(frozen=True)
class Training:
    """A row with its setup, and its machine if the time can be predicted."""

    row: Row
    setup: Setup
    machine: Machine | None

    @property
    def timed(self) -> Setup:
        """The setup whose step took the time. Rows that are padded to the longest of a pass have fewer tokens."""
        return replace(self.setup, sequence=self.row.timed_seq or self.setup.sequence)


def training_of(row: Row) -> Training | None:
    """Return the training of a row; None: it is not predicted, and `not_predicted` says why."""
    if row.config is None or row.dtype is None or row.not_predicted:
        return None
    about = {
        "model": _model(row, row.config),
        "deepspeed": None if row.deepspeed is None else {"zero_optimization": row.deepspeed},
        "ranks": row.n_gpus,
        "accumulation": row.grad_acc or 1,
        "sequence": row.seq,
        "precision": row.dtype,
        "library": Library(
            fused_layers=row.fused_kernels, bucket_view=row.deepspeed is not None, **_columns(row, Library)
        ),
    }
    setup = Setup(device="cuda", **_columns(row, Setup) | about)
    if row.gpu_name is None or row.time_not_predicted:
        return Training(row, setup, None)
    where = {"gpu": row.gpu_name, "gpus_per_node": min(setup.ranks, row.gpus_per_node or setup.ranks)}
    return Training(row, setup, Machine(**_columns(row, Machine) | where))


def _columns(row: Row, form: type[Setup | Library | Machine]) -> dict[str, Any]:
    """Return the columns that are called as fields of a form. A few mean what the source says, and are replaced."""
    return row.model_dump(include={field.name for field in fields(form)})


def _model(row: Row, config: str) -> Transformer:
    model = model_of(config)
    if row.adapter is None:
        return model
    targets = tuple((row.adapter_targets or "").split())
    adapters: dict[str, Any] = {"lora_rank": row.adapter_rank, "lora_targets": targets, "dora": row.adapter == "dora"}
    return replace(model, **adapters, adapter_dropout=row.adapter_dropout)


@functools.cache
def configs() -> dict[str, dict]:
    """Return the configs of the rows' models, by name. Their dimensions are published, and nothing is downloaded."""
    return json.loads((FOLDER / "configs.json").read_text())


@functools.cache
def model_of(name: str) -> Transformer:
    """Return the model of a name in configs.json, of another known name, or of a config as JSON."""
    if name.startswith("{"):
        return Transformer.of(json.loads(name), "a config of the row")
    if name not in configs():
        return named(name)
    config = dict(configs()[name])
    dropout = config.pop("dropout", None)
    return Transformer.of(config, name, dropout=dropout)


FLAT_MFU = 0.4  # a common assumption: this share of the peak, for the operations without recomputation
DEFAULTS = (
    "Assumed of every line: all weights train, attention is sdpa, AdamW is fused, the loss needs all logits at once, "
    "nothing is compiled, and the GPUs have the usual links of their kind, eight to a node. Where the file has no "
    "value: one pass in a step, no recomputation, and memory as PyTorch's allocated bytes."
)


@dataclass(frozen=True)
class Predicted:
    """Bytes or seconds, the ends of their interval, and seconds at a flat share of the peak. None: refused."""

    ours: float | None = None
    low: float | None = None
    high: float | None = None
    flat: float | None = None


def of_row(row: Row) -> dict[Quantity, Predicted]:
    """Return the predictions of what a row measured. What is refused is missing."""
    predicted: dict[Quantity, Predicted] = {}
    training = training_of(row)
    if training and row.memory_bytes and not row.memory_not_predicted:
        with suppress(Stop):
            predicted["memory"] = memory(training.setup, row.kind, row.gpu_name)
    if training and training.machine and row.step_s:
        with suppress(Stop):
            predicted["time"] = time(training.timed, training.machine)
    return predicted


def memory(setup: Setup, kind: MemoryKind | None, gpu: str | None) -> Predicted:
    """Return the bytes of a kind. An unsaid kind is taken as allocated, and may be any of the three."""
    if kind:
        return Predicted(memory_bytes(setup, kind, gpu))
    kinds = memory_kinds(setup, gpu)
    most = kinds.driver or (gpu and GPUS[gpu].memory_bytes)
    return Predicted(kinds.allocated, kinds.allocated, most) if most else Predicted(kinds.allocated)


def memory_bytes(setup: Setup, kind: MemoryKind, gpu: str | None) -> float:
    if kind == "allocated":
        return estimate(setup).peak_bytes
    size_bytes = getattr(memory_kinds(setup, gpu), kind)
    if size_bytes is None:
        raise Stop(f"{kind} memory is not known for ranks that divide a model", "give allocated bytes", "unavailable")
    return size_bytes


def time(setup: Setup, machine: Machine) -> Predicted:
    """Return the seconds of a step."""
    step = step_time(setup, machine)
    rows = setup.micro_batch * setup.accumulation / (setup.sequence_ranks * setup.tensor_ranks)
    flat_flops_per_s = FLAT_MFU * GPUS[machine.gpu].flops_per_s(not setup.has_half_products)
    flat_s = setup.model.flops_per_row(setup.sequence) * rows / flat_flops_per_s
    return Predicted(step.seconds, step.low_s, step.high_s, flat_s)


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
        about = {"model": one.model, "arm": one.arm, "on": f"{one.gpus} x {one.gpu}"}
        for quantity, measured in (("memory_gb", one.memory_gb), ("step_s", one.step_s)):
            if measured:
                line = about | {"quantity": quantity, "measured": measured}
                lines.append(line | _beside(one, quantity, measured))
    return lines


def _beside(one: Measurement, quantity: str, measured: float) -> dict:
    """Return a prediction as columns: the number, how far off it is, and its interval."""
    try:
        machine = Machine(gpu=gpu_named(one.gpu), gpus_per_node=min(one.gpus, 8))
        setup = Setup.of_arm(
            named(one.model),
            one.arm,
            ranks=one.gpus,
            sequence=one.tokens,
            micro_batch=one.rows,
            accumulation=one.passes,
            checkpointing=one.recompute,
            precision=one.precision,
            device="cuda",
        )
        if quantity == "step_s":
            step = step_time(setup, machine)
            predicted, interval = step.seconds, f"{short(step.low_s)} to {short(step.high_s)}"
        else:
            predicted, interval = memory_bytes(setup, one.memory_kind, machine.gpu) / 1e9, None
    except Stop as reason:
        return {"predicted": None, "off": str(reason)}
    return {"predicted": predicted, "off": percent(predicted / measured - 1, "+"), "interval": interval}
