"""The trainer's patches to libraries, with their reasons. The record lists the patches that were applied."""

import contextlib
import inspect

import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from torch.distributed.fsdp import CPUOffloadPolicy

from study.measure.hardware import CUDA
from study.records.schema import MemoryCap
from study.spec.arms import Arm

applied: set[str] = set()  # the names of the patches that were applied


@contextlib.contextmanager
def patched(owner, attribute: str, value, name: str):
    """Replace `owner.attribute` by `value` for a while."""
    applied.add(name)
    before = inspect.getattr_static(owner, attribute)  # a property itself, not its value
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        setattr(owner, attribute, before)


def ddp_on_one_gpu(arm: Arm) -> contextlib.AbstractContextManager:
    """Let Accelerate wrap a model in DDP on one GPU too, as on a CPU. Otherwise `ddp` would be `single`."""
    if CUDA and arm.distributed_type == "MULTI_GPU":
        return patched(Accelerator, "multi_device", True, "ddp_on_one_gpu")
    return contextlib.nullcontext()


def fsdp_without_a_gpu(plugin: FullyShardedDataParallelPlugin, mixed_precision: str) -> None:
    """Let Accelerate shard on a CPU too. Call it between its construction and `prepare`.

    Accelerate 1.15 engages FSDP only on GPUs (`state.py`, the branch of MULTI_GPU and similar types). On a CPU it
    trains two unrelated models, or DDP with `cpu=True`, without a message (`reproductions/fsdp_on_a_cpu_is_none.py`,
    `fsdp_on_a_cpu_is_ddp.py`). This function does what that branch does.
    """
    applied.add("fsdp_without_a_gpu")
    if mixed_precision != "no":
        plugin.set_mixed_precision(mixed_precision)
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload.pin_memory = False  # pinning is for copies to a GPU
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    for state in (AcceleratorState, PartialState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
        state._shared_state["device"] = torch.device("cpu")  # FSDP2 and fake tensors take cpu:0 for another device


def groups_without_a_gpu(groups: ParallelismConfig | None) -> None:
    """Let Accelerate divide the ranks of FSDP2 into groups on a CPU too, as it does on GPUs.

    Accelerate 1.15 refuses groups without FSDP2, and on a CPU FSDP2 is not engaged yet (`fsdp_without_a_gpu`).
    """
    if groups is not None:
        applied.add("groups_without_a_gpu")
        AcceleratorState._shared_state["parallelism_config"] = groups
        AcceleratorState._shared_state["device_mesh"] = groups.get_device_mesh("cpu")


def deepspeed_sees_free_memory(cap: MemoryCap | None) -> None:
    """Let DeepSpeed see the free memory under our cap. Stages 1 and 2 use it to decide where to flatten the weights.

    DeepSpeed 0.19.8 asks NVML, which ignores our cap, by a GPU number that CUDA_VISIBLE_DEVICES may shift.
    """

    def free_bytes(_=None) -> int:
        free = torch.cuda.mem_get_info()[0]
        return free if cap is None else min(free, cap.bytes - torch.cuda.memory_allocated())

    from deepspeed.accelerator import get_accelerator

    applied.add("deepspeed_sees_free_memory")
    get_accelerator().available_memory = free_bytes


def lower_loss_scale_on_overflow(zero) -> None:
    """Let DeepSpeed's autocast lower the loss scale when gradients overflow, as PyTorch's GradScaler does under DDP.

    DeepSpeed 0.19.8 detects the overflow from the norm of the gradients, and skips the step before it calls its
    GradScaler. So a scale that is too high is never lowered, and no step is ever taken
    (`reproductions/autocast_fp16_never_lowers_its_scale.py`).
    """
    scaler, update = zero.torch_autocast_gradscaler, zero._update_scale

    def update_both(overflow: bool) -> None:
        update(overflow)
        if overflow:
            lower = scaler.get_scale() * scaler.get_backoff_factor()
            scaler.load_state_dict(scaler.state_dict() | {"scale": lower, "_growth_tracker": 0})

    applied.add("lower_loss_scale_on_overflow")
    zero._update_scale = update_both
