"""Predicts what others measured: the bytes of a GPU at the peak, and the seconds of a step."""

import functools
import json
from contextlib import suppress
from dataclasses import dataclass, replace

from study.core.errors import Stop
from study.core.recipes import RECIPES
from study.predict.allocator import memory_kinds
from study.predict.architecture import named
from study.predict.estimate import estimate
from study.predict.outside.loops import OthersTraining
from study.predict.outside.published import FOLDER, MemoryKind, Quantity, Row
from study.predict.placement import Fsdp, Placement
from study.predict.step_time import AttentionKernel, Hardware, Host, kind_of_interval, step_time
from study.predict.trace.transformer import Transformer
from study.predict.training import Batch

KERNELS: dict[str, AttentionKernel] = {"fa2": "flash2", "fa3": "flash3", "te": "cudnn"}  # by the names of the table
NEW_AT_MOST_S = 2.5e-05  # for a kernel


@dataclass(frozen=True)
class Reading:
    """How we read a row."""

    training: OthersTraining
    timed: OthersTraining  # whose step took the time: padded rows have fewer tokens
    machine: Hardware | None  # None: the time cannot be predicted


def reading_of(row: Row) -> Reading | None:
    """Our reading of a row; None: it is not predicted."""
    if not (row.config and row.dtype and row.n_gpus and row.seq and row.micro_batch) or row.not_predicted:
        return None
    if row.tensor_ranks > 1:  # tensor parallelism is not modelled
        return None
    model = model_of(row.config)
    if row.adapter:
        model = replace(
            model,
            lora_rank=row.adapter_rank,
            lora_targets=tuple((row.adapter_targets or "").split()),
            dora=row.adapter == "dora",
            adapter_dropout=row.adapter_dropout,
        )
    placement = Placement(
        ranks=row.n_gpus,
        device="cuda",
        deepspeed=None if row.deepspeed is None else {"zero_optimization": row.deepspeed},
        fsdp=Fsdp(reshards=row.fsdp == "full_shard", offloads=row.fsdp_offload) if row.fsdp else None,
        group=row.group,
        sequence_ranks=row.sequence_ranks,
    )
    training = OthersTraining(
        model,
        RECIPES[row.dtype],
        Batch(row.micro_batch, row.grad_acc or 1, row.seq, row.checkpointing),
        placement,
        optimizer=row.optimizer,
        attention=row.attention,
        frozen=row.frozen,
        quantized=row.quantized,
        loss=row.loss,
        logits=row.logits,
        fused_layers=row.fused_kernels,
        keeps_logits=row.keeps_logits,
        torch_major=row.torch_major,
        # Others' DDP keeps gradients beside its buckets, which is PyTorch's default; DeepSpeed has no such buckets.
        bucket_view=row.deepspeed is not None,
    )
    machine = None
    if row.gpu_name and not row.time_not_predicted:
        machine = Hardware(
            gpu=row.gpu_name,
            gpus_per_node=min(row.n_gpus, row.gpus_per_node or row.n_gpus),
            network=row.network,
            tf32=row.tf32,
            fused_kernels=row.fused_kernels,
            products_8_bits=row.products_8_bits,
            attention=KERNELS.get(row.attention_kernel or "", "sdpa"),
            host=host_of(row),
            loops_over_experts=row.experts == "loop",
        )
    timed = replace(training, batch=replace(training.batch, tokens=row.timed_seq or row.seq))
    return Reading(training, timed, machine)


def host_of(row: Row) -> Host:
    """The class of the host: new if somebody measured a quick one; none if a compiler launches the kernels."""
    if row.kernel_s == 0:
        return "none"
    return "new" if row.kernel_s and row.kernel_s <= NEW_AT_MOST_S else "unsaid"


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
    limit: str | None = None  # of a step: gpu, host or links


def of_row(row: Row) -> dict[Quantity, Predicted]:
    """The predictions of what a row measured. What is refused is missing."""
    predicted: dict[Quantity, Predicted] = {}
    reading = reading_of(row)
    if reading and "memory" in row.measured and not row.memory_not_predicted:
        with suppress(Stop):
            predicted["memory"] = memory(reading.training, row.kind, row.gpu_name)
    if reading and reading.machine and "time" in row.measured:
        with suppress(Stop):
            step = step_time(reading.timed, reading.machine)
            predicted["time"] = Predicted(step.seconds, step.low_s, step.high_s, kind_of_interval(step.limit))
    return predicted


def memory(training: OthersTraining, kind: MemoryKind | None, gpu: str | None) -> Predicted:
    """The bytes of a kind. An unsaid kind is taken as allocated, and may be any of the three."""
    if kind == "allocated":  # the others take a replay of the allocator
        return Predicted(estimate(training).peak_bytes)
    kinds = memory_kinds(training, gpu)
    if kind:
        return Predicted(getattr(kinds, kind))
    # From what tensors take to what nvidia-smi shows.
    return Predicted(kinds.allocated, kinds.allocated, kinds.driver)
