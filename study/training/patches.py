"""The trainer's patches to libraries, with their reasons. The record lists the patches that were applied.

Most of them serve virtual ranks: rank 0 of N in one process, with a real engine and real buffers, and collectives that
move no data. The other ranks' parts of weights and gradients are uninitialised memory, so a virtual run has no loss.
"""

import contextlib
import re
import sys
import types
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import PreTrainedModel

from study.core.arms import Arm
from study.core.models.values import WithoutValues
from study.measure.hardware import CUDA
from study.measure.virtual_rank import all_reduce
from study.records.sections import MemoryCap

applied: set[str] = set()  # the names of the patches that were applied


def patched(owner, attribute: str, value, name: str) -> contextlib.AbstractContextManager:
    """Replace `owner.attribute` by `value` for a while."""
    applied.add(name)
    return mock.patch.object(owner, attribute, value)


def ddp_on_one_gpu(arm: Arm) -> contextlib.AbstractContextManager:
    """Let Accelerate wrap a model in DDP on one GPU too, as on a CPU. Otherwise `ddp` would be `single`."""
    if CUDA and arm.distributed_type == "MULTI_GPU":
        return patched(Accelerator, "multi_device", True, "ddp_on_one_gpu")
    return contextlib.nullcontext()


def fsdp_without_a_gpu(
    plugin: FullyShardedDataParallelPlugin, mixed_precision: str, groups: ParallelismConfig | None
) -> None:
    """Let Accelerate shard on a CPU too, and divide the ranks into groups. Call it before `prepare`.

    Accelerate 1.15 engages FSDP only on GPUs, as is done here (`AcceleratorState.__init__`, branch of MULTI_GPU). On a
    CPU it trains two unrelated models, or DDP with `cpu=True` (`reproductions/fsdp_on_a_cpu_is_{none,ddp}.py`).
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
    if groups is not None:  # Accelerate refuses them while FSDP2 is not engaged
        applied.add("groups_without_a_gpu")
        AcceleratorState._shared_state["parallelism_config"] = groups
        AcceleratorState._shared_state["device_mesh"] = groups.get_device_mesh("cpu")


def deepspeed_sees_free_memory(cap: MemoryCap | None) -> None:
    """Let stages 1 and 2 see the free memory under our cap, by which they decide where to flatten the weights.

    DeepSpeed 0.19.8 asks NVML, which ignores the cap, and fails if CUDA_VISIBLE_DEVICES names a GPU by its UUID.
    """
    from deepspeed.accelerator import get_accelerator

    limit = getattr(cap, "bytes", sys.maxsize)
    applied.add("deepspeed_sees_free_memory")
    get_accelerator().available_memory = lambda *_: min(
        torch.cuda.mem_get_info()[0], limit - torch.cuda.memory_allocated()
    )


def lower_loss_scale_on_overflow(zero) -> None:
    """Let DeepSpeed's autocast lower the loss scale when gradients overflow, as PyTorch's GradScaler does under DDP.

    DeepSpeed 0.19.8 skips the step before it calls its GradScaler, so a scale that is too high is never lowered, and no
    step is ever taken (`reproductions/autocast_fp16_never_lowers_its_scale.py`).
    """
    scaler = zero.torch_autocast_gradscaler
    update = zero._update_scale

    def update_both(overflow: bool) -> None:
        update(overflow)
        if overflow:
            # By its own factor, a half; and the count of steps since the last overflow begins anew.
            lower = scaler.get_scale() * scaler.get_backoff_factor()
            scaler.load_state_dict(scaler.state_dict() | {"scale": lower, "_growth_tracker": 0})

    applied.add("lower_loss_scale_on_overflow")
    zero._update_scale = update_both


def name_layers(accelerator: Accelerator, model: PreTrainedModel) -> None:
    """Make the layers of a model Accelerate's units, except modules that contain the input embeddings.

    Accelerate 1.15 makes a unit of each class in `_no_split_modules`, and another of the input embeddings. BERT's,
    ViT's and ModernBERT's would be sharded twice, a TypeError (`reproductions/fsdp2_cannot_shard_bert.py`). BioGPT,
    DeBERTa and others name no class, and would stay whole: their layers are those of their stacks.
    """
    embeddings = model.get_input_embeddings()
    holders = {type(module).__name__ for module in model.modules() if embeddings in module.modules()}
    layers = set(model._no_split_modules or ())
    if not layers:
        for name, stack in model.named_modules():
            if isinstance(stack, torch.nn.ModuleList) and not re.search(r"\d", name):  # in no layer of another stack
                layers |= {type(layer).__name__ for layer in stack}
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = sorted(layers - holders)


@contextlib.contextmanager
def without_values(sharded_by_fsdp: bool):
    """Give tensors shapes but no memory, so that a laptop can show what a model of any size would do.

    The patches replace functions that compare values between ranks, or that access memory which does not exist.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.adam import cpu_adam
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
    from torch.nn.parallel import distributed

    def nothing(*_, **__) -> None:
        pass

    operator = types.SimpleNamespace(create_adam=nothing, adam_update=nothing, destroy_adam=nothing)
    builder = types.SimpleNamespace(load=lambda: operator)
    with (
        patched(coordinator, "assert_ints_same_as_other_ranks", nothing, "no_comparison_of_ints_between_ranks"),
        patched(distributed, "_verify_param_shape_across_processes", nothing, "no_comparison_of_shapes_between_ranks"),
        # DDP regroups its buckets after the first step, in agreement with the other ranks. Without regrouping, the
        # number of calls may differ, but not the bytes.
        patched(dist.Reducer, "_rebuild_buckets", lambda *_, **__: False, "ddp_keeps_its_first_buckets"),
        # Everything is created on the right device.
        patched(torch.nn.Module, "to", lambda model, *_, **__: model, "models_are_not_moved"),
        patched(cpu_adam, "CPUAdamBuilder", lambda: builder, "cpu_adam_without_its_operator"),
        patched(get_accelerator(), "pin_memory", lambda tensor, *_, **__: tensor, "memory_is_not_pinned"),
        # PyTorch would create a real tensor for it.
        patched(torch.Tensor, "record_stream", nothing, "streams_are_not_recorded"),
        _fsdp_without_values() if sharded_by_fsdp else contextlib.nullcontext(),
        FakeTensorMode(allow_non_fake_inputs=True),
        WithoutValues(),
    ):
        yield


@contextlib.contextmanager
def _fsdp_without_values():
    from torch.distributed.fsdp._fully_shard import _fully_shard as fully_shard

    mesh = fully_shard._init_default_mesh()  # made before the fake mode begins, and handed out to each module
    with (
        patched(fully_shard, "_init_default_mesh", lambda: mesh, "mesh_of_ranks_has_values"),
        # Accelerate uses the address to find an optimizer's parameters again after FSDP2 has sharded them.
        patched(torch.Tensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata, "addresses_of_no_memory"),
    ):
        yield


def stand_alone(model) -> None:
    """Let the model of a virtual rank do without the ranks that do not exist."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model.register_comm_hook(None, all_reduce)  # its C++ code needs a result that the fake backend lacks
    if hook := getattr(model, "first_dataloader_check", None):  # AutoTP compares the rows of its first pass
        applied.add("no_comparison_of_rows_between_ranks")
        hook.remove()
