"""Predicts what others measured: the bytes of a GPU at the peak, and the seconds of a step."""

import functools
import json
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from study.core.errors import Stop
from study.predict.architecture import named
from study.predict.estimate import estimate
from study.predict.memory.memory_kinds import memory_kinds
from study.predict.outside.published import FOLDER, MemoryKind, Quantity, Row
from study.predict.setup import Library, Setup
from study.predict.step_time import Machine, step_time
from study.predict.trace.transformer import Transformer

T = TypeVar("T", Setup, Library, Machine)


@dataclass(frozen=True)
class Training:
    setup: Setup
    timed: Setup  # whose step took the time: padded rows have fewer tokens
    machine: Machine | None  # None: the time cannot be predicted


def training_of(row: Row) -> Training | None:
    """The training of a row; None: it is not predicted, and `not_predicted` says why."""
    if row.config is None or row.dtype is None or row.not_predicted:
        return None
    model = model_of(row.config)
    if row.adapter:
        targets = tuple((row.adapter_targets or "").split())
        model = replace(model, lora_rank=row.adapter_rank, lora_targets=targets, dora=row.adapter == "dora")
        model = replace(model, adapter_dropout=row.adapter_dropout)
    about: dict[str, Any] = {"ranks": row.n_gpus, "accumulation": row.grad_acc or 1, "sequence": row.seq}
    about |= {"model": model, "precision": row.dtype, "device": "cuda"}
    if row.deepspeed is not None:
        about["deepspeed"] = {"zero_optimization": row.deepspeed}
    # Others' DDP keeps gradients beside its buckets, which is PyTorch's default; DeepSpeed has no such buckets.
    library = _of_columns(row, Library, fused_layers=row.fused_kernels, bucket_view=row.deepspeed is not None)
    setup = _of_columns(row, Setup, library=library, **about)
    machine = None
    if row.gpu_name and not row.time_not_predicted:
        per_node = min(setup.ranks, row.gpus_per_node or setup.ranks)
        machine = _of_columns(row, Machine, gpu=row.gpu_name, gpus_per_node=per_node)
    return Training(setup, replace(setup, sequence=row.timed_seq or setup.sequence), machine)


def _of_columns(row: Row, form: type[T], **values: Any) -> T:
    """A form from the columns that are called as its fields. A few mean what the source says, and are replaced."""
    names = {field.name for field in fields(form)}
    return form(**row.model_dump(include=names) | values)


@functools.cache
def model_of(name: str) -> Transformer:
    """The model of a name in configs.json, of another known name, or of a config as JSON."""
    if name.startswith("{"):
        return Transformer.of(json.loads(name), "a config of the row")
    configs = json.loads((FOLDER / "configs.json").read_text())  # published dimensions: nothing is downloaded
    if name not in configs:
        return named(name)
    dropout = configs[name].pop("dropout", None)
    return Transformer.of(configs[name], name, dropout=dropout)


@dataclass(frozen=True)
class Predicted:
    """Bytes or seconds, and the ends of their interval. None: refused."""

    ours: float | None = None
    low: float | None = None
    high: float | None = None


def of_row(row: Row) -> dict[Quantity, Predicted]:
    """The predictions of what a row measured. What is refused is missing."""
    predicted: dict[Quantity, Predicted] = {}
    training = training_of(row)
    if training and "memory" in row.measured and not row.memory_not_predicted:
        with suppress(Stop):
            predicted["memory"] = memory(training.setup, row.kind, row.gpu_name)
    if training and training.machine and "time" in row.measured:
        with suppress(Stop):
            step = step_time(training.timed, training.machine)
            predicted["time"] = Predicted(step.seconds, step.low_s, step.high_s)
    return predicted


def memory(setup: Setup, kind: MemoryKind | None, gpu: str | None) -> Predicted:
    """The bytes of a kind. An unsaid kind is taken as allocated, and may be any of the three."""
    if kind == "allocated":  # the others take a replay of the allocator
        return Predicted(estimate(setup).peak_bytes)
    kinds = memory_kinds(setup, gpu)
    if kind:
        return Predicted(getattr(kinds, kind))
    # From what tensors take to what nvidia-smi shows.
    return Predicted(kinds.allocated, kinds.allocated, kinds.driver)
