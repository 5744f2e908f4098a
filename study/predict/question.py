"""The question that an advice answers: what to train, and on which machine. Everything not given has a default."""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import ByteSize, TypeAdapter, ValidationError

from study.core.arms import Arm
from study.core.errors import Stop, nearest, refuse_beyond
from study.core.gpus import GPUS, LINKS, Gpu, gpu_named, like
from study.core.ignored_keys import OFFLOADS
from study.core.recipes import RECIPES, Precision
from study.core.settings import MOST, Tokens
from study.core.text import say_aside
from study.predict import calibration
from study.predict.deepspeed_keys import Keys, with_keys
from study.predict.optimizer_states import Optimizer
from study.predict.pace import Pace
from study.predict.placement import Placement
from study.predict.step_time import AttentionKernel, Hardware
from study.predict.trace.transformer import Transformer
from study.predict.training import Batch, Quantized, Recomputation, Training

GPUS_AT_MOST = 2**16  # more is a typing error
USUAL_GPUS = 8  # those of most nodes
ANY_GPU = "H100-80GB"  # where no number depends on the kind: its nodes are as most


# --- what a user says -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainingFlags:
    """The training."""

    gpus: Annotated[int | None, tyro.conf.arg(aliases=("--ranks",))] = None
    """GPUs over all nodes. Default: 8; `advise` looks for the fewest."""
    sequence: Tokens | None = None
    """Tokens per sequence. Default: 2048, or as many as the model reads."""
    precision: Precision | None = None
    """bf16_cast: with fp32 master copies, DeepSpeed's default.
    bf16: autocast over fp32 weights, else the default."""
    optimizer: Optimizer | None = None
    """adamw: fused. foreach: PyTorch's AdamW by default."""

    def __post_init__(self) -> None:
        refuse_beyond("--gpus", self.gpus, GPUS_AT_MOST)
        refuse_beyond("--sequence", self.sequence, MOST)

    @property
    def ranks(self) -> int:
        return self.gpus or USUAL_GPUS


@dataclass(frozen=True, kw_only=True)
class PlaceFlags:
    """The machine, and what other loops than this study's can do."""

    gpu: str | None = None
    """Kind of GPU: H100, A100-40GB or 3090. An unknown name lists all."""
    gpu_memory: str | None = None
    """Memory of a card that is not listed, or of a slice: 12GB is 12 GiB. --gpu is most like it."""
    gpu_tflops: float | None = None
    """With --gpu-memory: its TFLOP/s in 16 bits. Its memory is then as much slower or faster than that of --gpu."""
    link: str | None = None
    """The slowest link between the GPUs: nvlink, pcie4, ib-hdr and others. Of a network: one port for each GPU."""
    gpus_per_node: int | None = None
    """GPUs that share a host. Default: mostly 8."""
    machine: Path | None = field(default_factory=calibration.from_environment)
    """The machine.json of `study calibrate`: seconds of a known host. Default: ZERO_STUDY_MACHINE names it."""
    disk: str | None = None
    """Read and write speed of a node's disk, such as 6GB/s. Default: no disk."""
    quantized: Quantized | None = None
    """With --lora-rank: how frozen layers are kept, as in QLoRA."""
    attention_kernel: AttentionKernel = "sdpa"
    """sdpa: PyTorch's own. flash3, cudnn: faster from Hopper on. eager keeps all scores."""
    chunked_loss: bool = False
    """The loss is computed in pieces, without all logits, as by Liger."""
    compiled: bool = False
    """The model is compiled: fewer kernels, and none that the host launches. What it keeps is not known."""
    optimizer_in_backward: bool = False
    """One GPU: each weight is updated as soon as its gradient is there."""


@dataclass(frozen=True, kw_only=True)
class StepFlags:
    """A step, and the host."""

    batch: int | None = None
    """Sequences per optimizer step, over all GPUs. Default: 128, or the next multiple of the GPUs."""
    checkpointing: bool | None = None
    """Recompute activations in the backward pass. Default: only if it helps."""
    sync_each_batch: tyro.conf.Suppress[bool] = False
    """FSDP2: gradients are reduced in each micro-batch."""
    host_memory: str | None = None
    """Host memory of a node, such as 512GiB or 1TB. Default: twice that of its GPUs that train, and at least 64 GB."""


# --- arms as the predictor takes them ---------------------------------------------------------------------------------

BUCKET_ELEMENTS = 50_000_000  # 100 MB in 16 bits: messages of that size come near a link's speed. Assumed
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")


def zero_of(arm: Arm) -> dict:
    """Return the section `zero_optimization` of an arm; empty without DeepSpeed."""
    return (arm.deepspeed or {}).get("zero_optimization", {})


def settled_arm(
    arm: Arm,
    gpus: int,
    local: int,
    bucket_elements: int | None = None,
    homes: tuple[str, str] | None = None,
    keys: Keys = (),
) -> Arm:
    """An arm with groups as large as nodes, and with such buckets and homes of states and weights. None: its own.

    `keys` are what a config of DeepSpeed says besides.
    """
    if bucket_elements is not None and bucket_elements < 1:
        raise Stop(f"buckets must have at least 1 element (got {bucket_elements})", "give 1 or more")
    if arm.replicas > 1 and arm.shards == "auto":
        arm = replace(arm, replicas=max(2, gpus // local))
    elif arm.divides_ranks and gpus > local:
        arm = replace(arm, second_copy_ranks=local)
    return with_keys(with_homes(with_buckets(arm, bucket_elements), homes), keys)


def with_homes(arm: Arm, homes: tuple[str, str] | None) -> Arm:
    """An arm that keeps the optimizer's states, and the weights, where a config says. None: its own."""
    if homes is None:
        return arm
    written = dict(zip(OFFLOADS, homes, strict=True))
    sections = {part: zero_of(arm).get(part, {}) | {"device": home} for part, home in written.items()}
    content = (arm.deepspeed or {}) | {"zero_optimization": zero_of(arm) | sections}
    return replace(arm, deepspeed=content, offload_optimizer=homes[0], offload_param=homes[1])


def with_buckets(arm: Arm, elements: int | None = BUCKET_ELEMENTS) -> Arm:
    """An arm with buckets of this size, if it has buckets. None: its own."""
    if arm.deepspeed is None or elements is None:
        return arm
    sizes = {name: elements for name in BUCKETS if name in zero_of(arm)}
    return replace(arm, deepspeed=arm.deepspeed | {"zero_optimization": zero_of(arm) | sizes})


def usual_precision(arm: Arm) -> Precision:
    """DeepSpeed keeps fp32 master copies of 16-bit weights. Without it Accelerate keeps the weights in fp32."""
    return "bf16_cast" if arm.deepspeed else "bf16"


# --- the question ----------------------------------------------------------------------------------------------------

# Assumed, and an advice says so.
SEQUENCE = 2048  # tokens of a row, if the model reads as many
BATCH = 128  # rows of a step, rounded up to a multiple of the GPUs
LEAST_HOST_BYTES = 64e9
HOST_SHARE = 2  # the memory of most nodes is at least twice that of their GPUs
MOST_ROWS = 10**6  # of a step: a larger batch is a typing error
LEAST_BYTES = 1e6  # less is a size without its unit
KINDS = {"nvlink": "nv", "infiniband": "ib", "ethernet": "eth"}  # how the names of such links begin


@dataclass(frozen=True)
class Question:
    """A training and its machine. `batch` is the rows of an optimizer step, over all GPUs."""

    model: Transformer
    gpus: int
    gpu: Gpu
    link: str | None  # the slowest link between GPUs, a name in LINKS; None for a single GPU
    host_memory_bytes: float  # of a node
    sequence: int
    batch: int
    precision: Precision | None = None  # None: the usual one of each arm
    checkpointing: bool | None = None  # None: both are tried
    sync_each_batch: bool = False  # FSDP2: Accelerate reduces gradients in each micro-batch, and not in the last alone
    disk_bytes_per_s: float | None = None  # of a node; None: nothing is offloaded to disk
    gpus_per_node: int = 8
    optimizer: Optimizer = "adamw"
    quantized: Quantized | None = None  # frozen linear layers
    attention_kernel: AttentionKernel = "sdpa"
    chunked_loss: bool = False
    compiled: bool = False
    optimizer_in_backward: bool = False
    pace: Pace | None = None  # the constants of a machine whose own steps were timed

    def __post_init__(self):
        refuse_beyond("--batch", self.batch, MOST_ROWS)
        if self.batch % self.gpus:
            above = ceil(self.batch / self.gpus) * self.gpus
            nearest_two = " or ".join(str(rows) for rows in (above - self.gpus, above) if rows)
            raise Stop(f"{self.gpus} GPUs do not divide a batch of {self.batch}", f"give --batch {nearest_two}")
        if self.optimizer_in_backward and self.gpus > 1:
            what = f"an optimizer within the backward pass is predicted for one GPU (got --gpus {self.gpus})"
            raise Stop(what, "leave --optimizer-in-backward out", "unavailable")

    @property
    def local(self) -> int:  # GPUs of a node that train
        return min(self.gpus, self.gpus_per_node)

    @property
    def machine(self) -> Hardware:  # its link is the slowest one: with several nodes, that between nodes
        machine = Hardware(
            gpu=self.gpu,
            gpus_per_node=self.local,
            disk_bytes_per_s=self.disk_bytes_per_s,
            attention=self.attention_kernel,
            fused_kernels=self.compiled,
            host="none" if self.compiled else "unsaid",
            pace=self.pace,
        )
        if self.gpus > self.local:
            return replace(machine, network=self.link)
        return replace(machine, link=self.link)

    def training(self, arm: Arm, rows: int, passes: int) -> Training:
        placement = Placement.of(arm, self.gpus, "cuda")
        if placement.fsdp:
            fsdp = placement.fsdp._replace(sync_each_batch=self.sync_each_batch)
            placement = replace(placement, fsdp=fsdp)
        return Training(
            self.model,
            RECIPES[self.precision or usual_precision(arm)],
            Batch(rows, passes, self.sequence, Recomputation(self.checkpointing or False)),
            placement,
            optimizer=self.optimizer,
            attention=self.attention_kernel,
            frozen="bf16",
            quantized=self.quantized,
            loss="chunked" if self.chunked_loss else "whole",
            optimizer_in_backward=self.optimizer_in_backward,
        )

    @classmethod
    def of(
        cls, model: Transformer, training: TrainingFlags, place: PlaceFlags, step: StepFlags | None = None
    ) -> "Question":
        step = step or StepFlags()
        here = calibration.read(place.machine) if place.machine else None
        if here and not here.gpu:
            say_aside(f"{place.machine} is of a CPU, and says nothing here")
            here = None
        disk_bytes_per_s = here.disk_bytes_per_s if here else None
        if place.disk:
            disk_bytes_per_s = bytes_of(place.disk, "--disk")
        gpus, gpu = training.ranks, gpu_of(place, here.gpu if here else None)
        per_node = node_size(gpus, gpu, place.gpus_per_node)
        local = min(gpus, per_node)
        host_memory_bytes = max(LEAST_HOST_BYTES, HOST_SHARE * local * gpu.memory_bytes)
        if step.host_memory:
            host_memory_bytes = bytes_of(step.host_memory, "--host-memory")
        return cls(
            model=model,
            gpus=gpus,
            gpu=gpu,
            link=link_named(place.link, gpu, several_nodes=gpus > local) if gpus > 1 else None,
            host_memory_bytes=host_memory_bytes,
            sequence=training.sequence or default_sequence(model),
            batch=ceil(BATCH / gpus) * gpus if step.batch is None else step.batch,
            precision=training.precision,
            checkpointing=step.checkpointing,
            sync_each_batch=step.sync_each_batch,
            disk_bytes_per_s=disk_bytes_per_s,
            gpus_per_node=per_node,
            optimizer=training.optimizer or "adamw",
            quantized=place.quantized,
            attention_kernel=place.attention_kernel,
            chunked_loss=place.chunked_loss,
            compiled=place.compiled,
            optimizer_in_backward=place.optimizer_in_backward,
            pace=calibration.known(here).pace if here else None,
        )


def gpu_of(place: PlaceFlags, here: str | None) -> Gpu:
    """The kind of GPU that a user means. `here`: that of the machine whose steps were timed."""
    kind = place.gpu or here
    if kind is None:
        raise Stop("--gpu is missing", "give the kind of your GPUs, such as H100 or RTX4090")
    gpu = GPUS[gpu_named(kind)]
    if place.gpu_memory:
        # Makers write GB and mean GiB.
        return like(gpu, bytes_of(place.gpu_memory.lower().replace("gb", "gib"), "--gpu-memory"), place.gpu_tflops)
    if place.gpu_tflops:
        raise Stop("--gpu-tflops is of a card that is not in the list", "give --gpu-memory as well")
    return gpu


def default_sequence(model: Transformer) -> int:
    return min(SEQUENCE, model.positions or SEQUENCE)


def node_size(gpus: int, gpu: Gpu, given: int | None) -> int:
    """GPUs in a node. By default the largest number that such machines have and that divides `gpus`."""
    if given is None:
        return next(n for n in range(gpu.per_node, 0, -1) if gpus % n == 0)
    if given < 1 or gpus % min(gpus, given):
        raise Stop(f"{gpus} GPUs do not fill nodes of {given}", "give --gpus-per-node a divisor of the GPUs")
    return given


def link_named(text: str | None, gpu: Gpu, several_nodes: bool) -> str:
    """The name in LINKS that a user means. `nvlink`, `pcie` and `infiniband` mean the links of this GPU."""
    if text is None:
        return gpu.network if several_nodes else gpu.peer_link
    name = text.lower().replace("_", "-").replace(" ", "-")
    links = (gpu.peer_link, gpu.host_link, gpu.network, "ib-hdr", "pcie5", *LINKS)
    for link in links:
        if link.startswith(KINDS.get(name, name)):
            return link
    raise Stop(f"{text!r} is not a known link between GPUs", nearest(name, [*LINKS, *KINDS], most=3))


def bytes_of(text: str, flag: str) -> float:
    """Bytes from a text such as 1TB or 80 GiB, or bytes a second from 6GB/s."""
    size_bytes = 0
    with suppress(ValidationError, OverflowError):
        size_bytes = TypeAdapter(ByteSize).validate_python(text)
    if size_bytes < LEAST_BYTES:
        raise Stop(f"{flag} {text!r:.80} is not a size", "give a number with its unit, such as 512GB, 80GiB or 6GB/s")
    return size_bytes
