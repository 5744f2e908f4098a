"""The question that an advice answers: what to train, and on which machine. Everything not given has a default."""

from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal

from pydantic import ByteSize, TypeAdapter, ValidationError

from study.core.arms import Arm
from study.core.errors import Stop, nearest
from study.core.gpus import GPUS, LINKS, Gpu, gpu_named, like
from study.predict.setup import Optimizer, Quantized, Setup, distribution
from study.predict.step_time import Machine
from study.predict.trace.transformer import Transformer

Precision = Literal["fp32", "bf16", "fp16", "bf16_cast", "bf16_pure"]  # of the trainer
BUCKET_ELEMENTS = 50_000_000  # 100 MB in 16 bits: messages of that size come near a link's speed. Assumed
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")


def zero_of(arm: Arm) -> dict:
    """Return the section `zero_optimization` of an arm; empty without DeepSpeed."""
    return (arm.deepspeed or {}).get("zero_optimization", {})


def with_zero(arm: Arm, settings: dict) -> Arm:
    if not settings:  # it may be without DeepSpeed
        return arm
    return replace(arm, deepspeed=(arm.deepspeed or {}) | {"zero_optimization": zero_of(arm) | settings})


def settled_arm(arm: Arm, gpus: int, local: int, bucket_elements: int | None = None) -> Arm:
    """An arm with groups as large as nodes, and with such buckets. None: its own."""
    if bucket_elements is not None and bucket_elements < 1:
        raise Stop(f"buckets must have at least 1 element (got {bucket_elements})", "give 1 or more")
    if arm.replicas > 1:
        arm = replace(arm, replicas=max(2, gpus // local))
    elif arm.divides_ranks and gpus > local:
        arm = with_zero(arm, {"zero_hpz_partition_size": local})
    return with_buckets(arm, bucket_elements)


def with_buckets(arm: Arm, elements: int | None = BUCKET_ELEMENTS) -> Arm:
    """An arm with buckets of this size, if it has buckets. None: its own."""
    return with_zero(arm, {name: elements for name in BUCKETS if elements and name in zero_of(arm)})


def usual_precision(arm: Arm) -> Precision:
    """DeepSpeed keeps fp32 master copies of 16-bit weights. Without it Accelerate keeps the weights in fp32."""
    return "bf16_cast" if arm.deepspeed else "bf16"


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
    gpu: str
    link: str | None  # the slowest link between GPUs, a name in LINKS; None for a single GPU
    host_memory_bytes: float  # of a node
    sequence: int
    batch: int
    precision: Precision | None = None  # None: the usual one of each arm
    checkpointing: bool | None = None  # None: both are tried
    disk_bytes_per_s: float | None = None  # of a node; None: nothing is offloaded to disk
    gpus_per_node: int = 8
    optimizer: Optimizer = "fused"
    quantized: Quantized | None = None  # frozen linear layers

    def __post_init__(self):
        if not 0 < self.batch <= MOST_ROWS:
            raise Stop(f"--batch must be from 1 to {MOST_ROWS} rows (got {self.batch})", "give the rows of one step")
        if self.batch % self.gpus:
            raise Stop(f"{self.gpus} GPUs do not divide a batch of {self.batch}", f"give a multiple of {self.gpus}")

    @property
    def local(self) -> int:  # GPUs of a node that train
        return min(self.gpus, self.gpus_per_node)

    @property
    def machine(self) -> Machine:  # its link is the slowest one: with several nodes, that between nodes
        place: dict[str, Any] = {"network" if self.gpus > self.local else "link": self.link}
        return Machine(gpu=self.gpu, gpus_per_node=self.local, disk_bytes_per_s=self.disk_bytes_per_s, **place)

    def setup(self, arm: Arm, micro_batch: int, accumulation: int) -> Setup:
        return Setup(
            model=self.model,
            **distribution(arm, self.gpus),
            ranks=self.gpus,
            precision=self.precision or usual_precision(arm),
            micro_batch=micro_batch,
            accumulation=accumulation,
            sequence=self.sequence,
            checkpointing=self.checkpointing or False,
            frozen="bf16",
            quantized=self.quantized,
            optimizer=self.optimizer,
            device="cuda",
        )

    @classmethod
    def of(
        cls,
        model: Transformer,
        gpus: int,
        gpu: str,
        *,
        gpu_memory: str | None = None,
        gpu_tflops: float | None = None,
        sequence: int | None = None,
        batch: int | None = None,
        link: str | None = None,
        host_memory: str | None = None,
        disk: str | None = None,
        gpus_per_node: int | None = None,
        **training: Any,
    ) -> "Question":
        name = gpu_named(gpu)
        if gpu_memory:
            name = like(name, bytes_of(gpu_memory, "--gpu-memory"), gpu_tflops)
        elif gpu_tflops:
            raise Stop("--gpu-tflops is of a card that is not in the list", "give --gpu-memory as well")
        per_node = node_size(gpus, name, gpus_per_node)
        local = min(gpus, per_node)
        host_memory_bytes = max(LEAST_HOST_BYTES, HOST_SHARE * local * GPUS[name].memory_bytes)
        if host_memory:
            host_memory_bytes = bytes_of(host_memory, "--host-memory")
        if disk:
            training["disk_bytes_per_s"] = bytes_of(disk, "--disk")
        return cls(
            model=model,
            gpus=gpus,
            gpu=name,
            link=link_named(link, GPUS[name], several_nodes=gpus > local) if gpus > 1 else None,
            host_memory_bytes=host_memory_bytes,
            sequence=sequence or default_sequence(model),
            batch=ceil(BATCH / gpus) * gpus if batch is None else batch,
            gpus_per_node=per_node,
            **training,
        )


def default_sequence(model: Transformer) -> int:
    return min(SEQUENCE, model.positions or SEQUENCE)


def node_size(gpus: int, gpu: str, given: int | None) -> int:
    """GPUs in a node. By default the largest number that such machines have and that divides `gpus`."""
    if given is None:
        return next(n for n in range(GPUS[gpu].per_node, 0, -1) if gpus % n == 0)
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
