"""The options that `advise`, `estimate` and `virtual` share, and the setup and the machine that they describe."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from study.errors import Stop
from study.machine.gpus import GPUS, gpu_named
from study.predictor import setup as setups
from study.predictor.advice.question import Precision, bytes_of, default_sequence, link_named, node_size
from study.predictor.advice.settled import settled_arm, usual_precision
from study.predictor.setup import Setup, distribution
from study.predictor.step_time import Machine
from study.predictor.tracing.transformer import Transformer
from study.spec import arms
from study.spec.settings import Optimizer, Tokens

Quantized = Literal["nf4", "nf4_double", "int8"]
GPUS_AT_MOST = 2**16


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training."""

    gpus: Annotated[int | None, tyro.conf.arg(aliases=("--ranks",))] = None
    """GPUs over all nodes. Default: 8; `advise` looks for the fewest."""
    sequence: Tokens | None = None
    """Tokens per row. Default: 2048, or as many as the model reads."""
    precision: Precision | None = None
    """As in the trainer. Default: 16 bits, in the usual way of the arm."""
    optimizer: Optimizer = "adamw"
    """As in the trainer. adamw: PyTorch's fused AdamW."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The machine, and how frozen weights are kept."""

    gpu: str | None = None
    """Kind of GPU: H100, A100-40GB, L4, RTX4090 and others."""
    link: str | None = None
    """The slowest link between the GPUs: nvlink, pcie4, ib-hdr and others."""
    gpus_per_node: int | None = None
    """GPUs that share a host. Default: mostly 8."""
    disk: str | None = None
    """Read and write speed of a node's disk, such as 6GB/s. Default: no disk."""
    quantized: Quantized | None = None
    """With --lora-rank: how the frozen linear layers are kept, as in QLoRA."""

    def machine(self, gpus: int) -> Machine | None:
        """Return the machine with so many GPUs; None if their kind is not given."""
        if self.gpu is None:
            if self.link or self.gpus_per_node or self.disk:
                raise Stop("options of a machine need its kind of GPU", "give --gpu")
            return None
        gpu = gpu_named(self.gpu)
        per_node = min(gpus, node_size(gpus, gpu, self.gpus_per_node))
        several = gpus > per_node
        joined = None if gpus == 1 or self.link is None else link_named(self.link, GPUS[gpu], several)
        return Machine(
            gpu=gpu,
            gpus_per_node=per_node,
            link=None if several else joined,
            network=joined if several else None,
            disk_bytes_per_s=None if self.disk is None else bytes_of(self.disk, "--disk", "B/s"),
        )


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The arm, and the passes of a step."""

    arm: str = "zero3"
    """Name of an arm; `study arms` lists them."""
    micro_batch: int = 1
    """Rows per GPU and pass."""
    accumulation: int = 1
    """Passes per step."""
    checkpointing: bool = False
    """Recompute activations in the backward pass."""


def setup_of(
    model: Transformer, training: Training, place: Place, passes: Passes, buckets: int | None
) -> tuple[Setup, Machine | None]:
    """Return the setup under an arm, and the machine."""
    arm = arms.load_arm(passes.arm)
    gpus = training.gpus or 8
    if not 0 < gpus <= GPUS_AT_MOST or training.gpus == 0:
        raise Stop(f"--gpus must be from 1 to {GPUS_AT_MOST} (got {training.gpus})", "give such a number")
    gpus = 1 if arm.distributed_type == "NO" else gpus
    machine = place.machine(gpus)
    settled = settled_arm(arm, gpus, machine.gpus_per_node if machine else gpus, bucket_elements=buckets)
    setup = Setup(
        model=model,
        ranks=gpus,
        **distribution(settled, gpus),
        precision=training.precision or usual_precision(arm),
        micro_batch=passes.micro_batch,
        accumulation=passes.accumulation,
        sequence=training.sequence or default_sequence(model),
        attention="sdpa" if model.has_fused_attention else "eager",
        checkpointing=passes.checkpointing,
        frozen="bf16",
        quantized=place.quantized,
        optimizer=predictors_name(training.optimizer),
        device="cuda",
    )
    return setup, machine


def predictors_name(optimizer: Optimizer) -> setups.Optimizer:
    """The predictor's name for an optimizer of the trainer, whose AdamW is the fused one."""
    return "fused" if optimizer == "adamw" else optimizer
