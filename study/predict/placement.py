"""Where a training runs: its ranks, and how they divide its states and rows."""

from dataclasses import dataclass, field
from typing import NamedTuple

from study.core.arms import Arm, feature_for_cuda_alone, zero_optimization
from study.core.errors import Stop
from study.core.files import value_at

GRADIENTS_KEPT_IN = "data_types.grad_accum_dtype"
FP32 = ("fp32", "float32", "float", "torch.float32")  # DeepSpeed's words for it (runtime/config.py, DtypeEnum)


class Fsdp(NamedTuple):
    """PyTorch's own sharding."""

    reshards: bool = True  # full_shard: weights are released after the forward pass. shard_grad_op keeps them
    by_accelerate: bool = False  # more units, as in the arms; else each layer and the root are units
    offloads: bool = False  # weights, gradients and optimizer states are on the host
    sync_each_batch: bool = False  # by Accelerate, which else reduces in the last pass of a step alone


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How ranks share a training. Without DeepSpeed and FSDP it is one process, or DDP."""

    ranks: int = 1
    device: str = "cpu"
    deepspeed: dict | None = field(default=None, hash=False)  # its config
    fsdp: Fsdp | None = None
    in_ddp: bool = False  # also a single rank, which has DDP's buckets all the same
    # Ranks in each of the groups that hold all states, as in FSDP's HYBRID_SHARD. None: all ranks are one group.
    group: int | None = None
    second_partition: int | None = None  # ranks that share a second copy of the weights (hpZ). None: no copy
    sequence_ranks: int = 1  # ranks that share rows, each with a part of the tokens

    @classmethod
    def of(cls, arm: Arm, ranks: int, device: str = "cpu") -> "Placement":
        """How an arm places a training. An arm for one process has one rank."""
        if feature := feature_for_cuda_alone(arm.deepspeed):
            raise Stop(f"what {feature} holds and sends is not predicted", "measure it", "unavailable")
        if arm.tensor_ranks > 1:
            raise Stop("tensor parallelism is not predicted", "measure it", "unavailable")
        if arm.distributed_type == "NO":
            ranks = 1
        fsdp = None
        if arm.fsdp:
            fsdp = Fsdp(arm.fsdp["fsdp_reshard_after_forward"], True, arm.fsdp["fsdp_offload_params"])
        return cls(
            ranks=ranks,
            device=device,
            deepspeed=arm.deepspeed,
            fsdp=fsdp,
            in_ddp=arm.distributed_type == "MULTI_GPU",
            group=arm.sharing_ranks(ranks),
            second_partition=arm.second_partition(ranks),
            sequence_ranks=arm.sequence_ranks,
        )

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def is_alone(self) -> bool:
        """Whether it is one process without a group of processes."""
        return self.ranks == 1 and not (self.deepspeed or self.fsdp or self.in_ddp)

    @property
    def zero(self) -> dict:
        """DeepSpeed's section zero_optimization, with its defaults."""
        return zero_optimization(self.deepspeed)

    @property
    def stage(self) -> int:
        return self.zero["stage"]

    @property
    def keeps_gradients_in_fp32(self) -> bool:
        """Whether DeepSpeed's config says so. Its optimizer of stage 1 then is another one, which is not predicted."""
        return self.stage in (2, 3) and value_at(self.deepspeed, GRADIENTS_KEPT_IN) in FP32

    @property
    def has_own_linear(self) -> bool:
        """Whether stage 3 computes linear layers itself. PyTorch's keep the gathered weights in the graph."""
        return self.stage == 3 and self.zero["memory_efficient_linear"]

    @property
    def sharing_ranks(self) -> int:
        """The ranks that hold all states together."""
        return self.group or self.ranks
