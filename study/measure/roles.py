"""Finds the tensors that hold the training state: weights, gradients, master copies, moments, buckets and others."""

import contextlib
from collections import defaultdict

import torch

from study.measure import fsdp

# The attributes in which DeepSpeed 0.19's optimizers keep the tensors of each role, found by reading their code and by
# experiments. A test fails if a large tensor of an arm has no role.
ROLES = {
    "weights": "bit16_groups_flat fp16_partitioned_groups_flat lp_param_buffer param_groups_fp16_flat_cpu_memory",
    "master": "single_partition_of_fp32_groups fp32_partitioned_groups_flat",
    "gradients": "averaged_gradients all_grad_tensors grad_partitions_flat_buffer offload_gradient_dict "
    "accumulated_grads_in_cpu lp_grad_partitions_flat_pin_buffers",
    "buckets": "ipg_buckets",
    "staging": "_muon_pending_momentum _muon_allgather_buffers "
    "param_buffer_of_bit16_for_cpu_offload_groups temp_grad_buffer_for_cpu_offload "
    "temp_grad_buffer_for_gpu_offload lp_param_contiguous_pin_buffer hp_params_pin_buffers",
    "swap": "optimizer_swapper",
}


def inner_optimizer(optimizer) -> torch.optim.Optimizer:
    """The optimizer that does the arithmetic, inside the wrappers of Accelerate and DeepSpeed."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def zero_optimizer(optimizer):
    """DeepSpeed's wrapper around that optimizer. None if there is none, as in its stage 0 with fp32."""
    while hasattr(optimizer, "optimizer"):
        if type(optimizer).__module__.startswith("deepspeed."):
            return optimizer
        optimizer = optimizer.optimizer
    return None


def plain_model(model) -> torch.nn.Module:
    """The model inside the wrappers of DDP, DeepSpeed and torch.compile.

    Accelerate's `unwrap_model` does the same, but imports DeepSpeed even for arms without it.
    """
    while wrapped := getattr(model, "_orig_mod", None) or getattr(model, "module", None):
        model = wrapped
    return model


def tensors_in(value, depth: int = 0) -> list[torch.Tensor]:
    """Every tensor in nested lists, tuples and dicts, and in DeepSpeed's buckets and swap buffers."""
    if isinstance(value, torch.Tensor):
        return [getattr(value, "_local_tensor", value)]  # the local part of a DTensor
    if depth > 6:
        return []
    if type(value).__name__.startswith("IPGBucket"):
        value = [value.buffer]
    if type(value).__name__.endswith("OptimizerSwapper"):
        value = value.swap_buffer_manager.all_buffers
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item, depth + 1)]
    return []


def tensors_by_role(model, optimizer) -> dict[str, list[torch.Tensor]]:
    """The tensors that hold the training state now, by role."""
    zero = zero_optimizer(optimizer)
    tensors: defaultdict[str, list[torch.Tensor]] = defaultdict(list)

    def add(role: str, value) -> None:
        tensors[role] += tensors_in(value)

    inner = inner_optimizer(optimizer)
    for state in inner.state.values():
        add("moments", [value for name, value in state.items() if name != "step"])
    add("master", getattr(inner, "master", []))
    for role, names in ROLES.items():
        for name in names.split():
            add(role, getattr(zero, name, None))
    add("gradients", [tensor.grad for tensor in tensors["master"]])
    in_parts = fsdp.version(model) is not None  # the model's own parameters are then the gathered ones
    for role, value in fsdp.tensors(model) if in_parts else ():
        add(role, value)
    for parameter in model.parameters():
        partition = getattr(parameter, "ds_tensor", None)
        add("weights" if partition is None and not in_parts else "gathered_weights", parameter.data)
        add("weights", [partition, getattr(parameter, "ds_secondary_tensor", None)])
        add("gradients", parameter.grad)
    add("constants", list(model.buffers()))
    return tensors


def claimed_storages(model, optimizer) -> dict[int, str]:
    """The role of each storage, by the address of its C++ object. The first role that claims a storage keeps it."""
    claimed, by_role = {}, tensors_by_role(model, optimizer)
    order = ("moments", "master", "swap", "weights", "buckets", "gradients", "staging", "gathered_weights", "constants")
    for role in order:
        for tensor in by_role[role]:
            if tensor.numel() and tensor.device.type != "meta" and tensor.layout == torch.strided:
                claimed.setdefault(tensor.untyped_storage()._cdata, role)
    return claimed


def dtypes(model, optimizer) -> dict[str, str | None]:
    """The dtypes of the parts of the training state; None for a part that does not exist now."""
    by_role = tensors_by_role(model, optimizer)
    result = {}
    for role in ("weights", "gradients", "master", "moments"):
        numbers = [tensor for tensor in by_role[role] if tensor.is_floating_point() or tensor.dtype == torch.uint8]
        kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in numbers}
        result[role] = " ".join(sorted(kinds)) or None
    return result


@contextlib.contextmanager
def before_each_update(optimizer, call):
    """Call `call` before each step of the optimizer that does the arithmetic."""
    hook = inner_optimizer(optimizer).register_step_pre_hook(lambda *_: call())
    try:
        yield
    finally:
        hook.remove()
