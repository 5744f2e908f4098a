"""Predicts what others measured: the bytes of a GPU at the peak, and the seconds of a step."""

import functools
import json
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from study.core.errors import Stop
from study.core.gpus import GPUS
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
    """A row with its setup, and its machine if the time can be predicted."""

    row: Row
    setup: Setup
    machine: Machine | None

    @property
    def timed(self) -> Setup:
        """The setup whose step took the time. Rows that are padded to the longest of a pass have fewer tokens."""
        return replace(self.setup, sequence=self.row.timed_seq or self.setup.sequence)


def training_of(row: Row) -> Training | None:
    """The training of a row; None: it is not predicted, and `not_predicted` says why."""
    if row.config is None or row.dtype is None or row.not_predicted:
        return None
    model = model_of(row.config)
    if row.adapter:
        targets = tuple((row.adapter_targets or "").split())
        model = replace(model, lora_rank=row.adapter_rank, lora_targets=targets, dora=row.adapter == "dora")
        model = replace(model, adapter_dropout=row.adapter_dropout)
    # Others' DDP keeps gradients beside its buckets, which is PyTorch's default; DeepSpeed has no such buckets.
    about: dict[str, Any] = {
        "model": model,
        "deepspeed": row.deepspeed,
        "ranks": row.n_gpus,
        "accumulation": row.grad_acc or 1,
        "sequence": row.seq,
        "precision": row.dtype,
        "library": _of_columns(row, Library, fused_layers=row.fused_kernels, bucket_view=row.deepspeed is not None),
    }
    if row.deepspeed is not None:
        about["deepspeed"] = {"zero_optimization": row.deepspeed}
    setup = _of_columns(row, Setup, device="cuda", **about)
    if row.gpu_name is None or row.time_not_predicted:
        return Training(row, setup, None)
    per_node = min(setup.ranks, row.gpus_per_node or setup.ranks)
    return Training(row, setup, _of_columns(row, Machine, gpu=row.gpu_name, gpus_per_node=per_node))


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


FLAT_MFU = 0.4  # a common assumption: this share of the peak, for the operations without recomputation


@dataclass(frozen=True)
class Predicted:
    """Bytes or seconds, the ends of their interval, and seconds at a flat share of the peak. None: refused."""

    ours: float | None = None
    low: float | None = None
    high: float | None = None
    flat: float | None = None


def of_row(row: Row) -> dict[Quantity, Predicted]:
    """The predictions of what a row measured. What is refused is missing."""
    predicted: dict[Quantity, Predicted] = {}
    training = training_of(row)
    if training and "memory" in row.measured and not row.memory_not_predicted:
        with suppress(Stop):
            predicted["memory"] = memory(training.setup, row.kind, row.gpu_name)
    if training and training.machine and "time" in row.measured:
        with suppress(Stop):
            predicted["time"] = time(training.timed, training.machine)
    return predicted


def memory(setup: Setup, kind: MemoryKind | None, gpu: str | None) -> Predicted:
    """The bytes of a kind. An unsaid kind is taken as allocated, and may be any of the three."""
    if kind == "allocated":  # the others take a replay of the allocator
        return Predicted(estimate(setup).peak_bytes)
    kinds = memory_kinds(setup, gpu)
    if kind:
        size_bytes = getattr(kinds, kind)
        if size_bytes is None:
            what = f"{kind} memory is not known for ranks that divide a model"
            raise Stop(what, "give allocated bytes", "unavailable")
        return Predicted(size_bytes)
    # From what tensors take to what nvidia-smi shows; where that is not known, to all of the GPU.
    most = kinds.driver or (gpu and GPUS[gpu].memory_bytes)
    return Predicted(kinds.allocated, kinds.allocated, most) if most else Predicted(kinds.allocated)


def time(setup: Setup, machine: Machine) -> Predicted:
    """The seconds of a step."""
    step = step_time(setup, machine)
    # Ranks that share rows or layers share their operations.
    rows = setup.micro_batch * setup.accumulation / (setup.sequence_ranks * setup.tensor_ranks)
    flat_flops_per_s = FLAT_MFU * GPUS[machine.gpu].flops_per_s(not setup.has_half_products)
    flat_s = setup.model.flops_per_row(setup.sequence) * rows / flat_flops_per_s
    return Predicted(step.seconds, step.low_s, step.high_s, flat_s)
