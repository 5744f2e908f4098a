"""The options that `advise`, `estimate` and `virtual` share, and the setup and the machine that they describe."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from study.core import arms
from study.core.errors import Stop
from study.core.settings import Optimizer, Tokens
from study.predict.front import Machine, Precision, Question, Setup, Transformer, settled_arm

Quantized = Literal["nf4", "nf4_double", "int8"]
GPUS_AT_MOST = 2**16
ANY_GPU = "H100"


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

    @property
    def ranks(self) -> int:
        return 8 if self.gpus is None else self.gpus


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


def question_of(model: Transformer, gpus: int, training: Training, place: Place, **more: Any) -> Question:
    """Return the question that the options ask. Without a kind of GPU, all GPUs are in one node."""
    if not 1 <= gpus <= GPUS_AT_MOST:
        raise Stop(f"--gpus must be from 1 to {GPUS_AT_MOST} (got {gpus})", "give such a number")
    return Question.of(model, gpus, place.gpu or ANY_GPU, **given(training, place) | more)


def given(training: Training, place: Place) -> dict[str, Any]:
    """Return the options as the predictor knows them; its name for the trainer's AdamW is the fused one."""
    options = vars(training) | vars(place)
    options["optimizer"] = "fused" if training.optimizer == "adamw" else training.optimizer
    return {name: value for name, value in options.items() if name not in ("gpus", "gpu")}


def setup_of(
    model: Transformer, training: Training, place: Place, passes: Passes, buckets: int | None
) -> tuple[Setup, Machine | None]:
    """Return the setup under an arm, and the machine; None if its kind of GPU is not given."""
    if place.gpu is None and (place.link or place.gpus_per_node or place.disk):
        raise Stop("options of a machine need its kind of GPU", "give --gpu")
    arm = arms.load_arm(passes.arm)
    gpus = 1 if arm.distributed_type == "NO" else training.ranks
    more = {} if place.gpu else {"gpus_per_node": gpus}
    question = question_of(model, gpus, training, place, checkpointing=passes.checkpointing, **more)
    arm = settled_arm(arm, gpus, question.local, buckets)
    setup = question.setup(arm, passes.micro_batch, passes.accumulation)
    return setup, question.machine if place.gpu else None
