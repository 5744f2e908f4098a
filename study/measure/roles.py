"""Finds the tensors that hold the training state: weights, gradients, master copies, moments, buckets and others."""

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch.utils.hooks import RemovableHandle

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
# Two tensors may share a storage, as a gradient that is a part of a bucket: the first role here keeps it.
ORDER = ("moments", "master", "swap", "weights", "buckets", "gradients", "staging", "gathered_weights", "constants")
DEEPEST = 6  # lists in lists: DeepSpeed nests three, and one that contains itself must end


def inner_optimizer(optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that does the arithmetic, inside the wrappers of Accelerate and DeepSpeed."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def zero_optimizer(optimizer):
    """Return DeepSpeed's wrapper around that optimizer. None if there is none, as in its stage 0 with fp32."""
    while hasattr(optimizer, "optimizer"):
        if type(optimizer).__module__.startswith("deepspeed."):
            return optimizer
        optimizer = optimizer.optimizer
    return None


def is_engine(model) -> bool:
    """Return whether a model is a DeepSpeed engine, which has an optimizer of its own."""
    return hasattr(model, "zero_optimization_stage")


def plain_model(model) -> torch.nn.Module:
    """Return the model inside the wrappers of DDP, DeepSpeed and torch.compile."""
    # Accelerate's `unwrap_model` does the same, but imports DeepSpeed even for arms without it.
    while wrapped := getattr(model, "_orig_mod", None) or getattr(model, "module", None):
        model = wrapped
    return model


def base_model(model) -> torch.nn.Module:
    """Return the model inside these wrappers and inside PEFT's adapters."""
    plain: Any = plain_model(model)
    return plain.get_base_model() if hasattr(plain, "peft_config") and hasattr(plain, "get_base_model") else plain


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: with stage 3 the tensor itself is empty, and FSDP2's is a DTensor."""
    return getattr(tensor, "ds_tensor", getattr(tensor, "_local_tensor", tensor))


def tensors_in(value, depth: int = 0) -> list[torch.Tensor]:
    """Return every tensor in nested lists, tuples and dicts, and in DeepSpeed's buckets and swap buffers."""
    if isinstance(value, torch.Tensor):
        return [getattr(value, "_local_tensor", value)]  # the local part of a DTensor
    kind = type(value).__name__
    if kind.startswith("IPGBucket"):
        value = [value.buffer]
    elif kind.endswith("OptimizerSwapper"):
        value = value.swap_buffer_manager.all_buffers
    elif isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple)) or depth > DEEPEST:
        return []
    return [tensor for item in value for tensor in tensors_in(item, depth + 1)]


def tensors_by_role(model, optimizer) -> dict[str, list[torch.Tensor]]:
    """Return the tensors that hold the training state now, by role."""
    zero = zero_optimizer(optimizer)
    inner = inner_optimizer(optimizer)
    # --- what optimizers hold
    # The optimizer that does the arithmetic has the moments: under ZeRO of this rank's flat partition.
    moments = [value for state in inner.state.values() for name, value in state.items() if name != "step"]
    pairs: list[tuple[str, object]] = [("moments", moments), ("master", getattr(inner, "master", []))]
    pairs += [(role, getattr(zero, name, None)) for role, names in ROLES.items() for name in names.split()]
    pairs += [("gradients", [tensor.grad for role, value in pairs if role == "master" for tensor in tensors_in(value)])]
    # --- what the model holds
    parameters = "weights"
    if fsdp_version(model) is not None:
        pairs += fsdp_tensors(model)
        parameters = "gathered_weights"  # the model's own parameters are then the gathered ones
    for parameter in model.parameters():
        part = getattr(parameter, "ds_tensor", None)  # of stage 3, where the parameter itself is gathered
        pairs += [
            (parameters if part is None else "gathered_weights", parameter.data),
            ("weights", [part, getattr(parameter, "ds_secondary_tensor", None)]),
            ("gradients", parameter.grad),
        ]
    tensors: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
    for role, value in [*pairs, ("constants", list(model.buffers()))]:
        tensors[role] += tensors_in(value)
    return tensors


def claimed_storages(model, optimizer) -> dict[int, str]:
    """Return the role of each storage, by the address of its C++ object."""
    claimed: dict[int, str] = {}
    by_role = tensors_by_role(model, optimizer)
    for role in ORDER:
        for tensor in by_role[role]:
            # Stage 3's released parameters are empty, and a sparse tensor has no storage.
            if tensor.numel() and tensor.device.type != "meta" and tensor.layout == torch.strided:
                claimed.setdefault(tensor.untyped_storage()._cdata, role)
    return claimed


def dtypes(model, optimizer) -> dict[str, str | None]:
    """Return the dtypes of the parts of the training state; None for a part that does not exist now."""
    by_role = tensors_by_role(model, optimizer)
    return {
        # uint8 are moments in 8 bits; other integers are counters
        role: names(each.dtype for each in by_role[role] if each.is_floating_point() or each.dtype == torch.uint8)
        for role in ("weights", "gradients", "master", "moments")
    }


def before_each_update(optimizer, call) -> RemovableHandle:
    """Call `call` before each step of the optimizer that does the arithmetic, until the handle is removed or left."""
    return inner_optimizer(optimizer).register_step_pre_hook(lambda *_: call())


@contextlib.contextmanager
def within_each_update(optimizer, context: Callable[[], AbstractContextManager]) -> Iterator[None]:
    """Enter `context` in each step of DeepSpeed's wrapper, which does more than the optimizer in it; none without."""
    zero = zero_optimizer(optimizer)
    if zero is None:
        yield
        return
    take_step = zero.step

    def step(*args, **kwargs):
        with context():
            return take_step(*args, **kwargs)

    with mock.patch.object(zero, "step", step):
        yield


# --- FSDP ------------------------------------------------------------------------------------------------------------


def fsdp_version(model) -> int | None:
    """Return 1 or 2; None without FSDP. The trainer has only the second; a watched script may have either."""
    if "torch.distributed.fsdp" not in sys.modules:
        return None
    if any(hasattr(module, "_get_fsdp_state") for module in model.modules()):
        return 2
    return 1 if list(flat_parameters(model)) else None


def fsdp_tensors(model) -> Iterator[tuple[str, object]]:
    """Return the tensors that FSDP holds of a model, by role."""
    # FSDP1 has one flat parameter for each of its units, and keeps what belongs to it in that tensor's attributes.
    for parameter in flat_parameters(model):
        yield "weights", getattr(parameter, "_local_shard", parameter.data)  # from the first pass on
        yield "gathered_weights", getattr(parameter, "_full_param_padded", None)
        yield "gradients", getattr(parameter, "_saved_grad_shard", None)
    # FSDP2 shards each parameter by itself, and gathers and reduces those of a unit together.
    for group in fsdp_units(model):
        for parameter in group.fsdp_params:
            yield "weights", parameter._sharded_param_data
            yield "gathered_weights", parameter.all_gather_outputs
            yield "gradients", parameter.sharded_param.grad
            whole = getattr(parameter, "_unsharded_param", None)  # holds gradients of passes that reduce nothing
            yield "gradients", [getattr(whole, "grad", None), parameter.unsharded_accumulated_grad]
        # Two gatherings may be under way: this unit's, and the one before it, which is copied out meanwhile.
        gathering = [group._all_gather_result, getattr(group.comm_ctx.all_gather_state, "all_gather_result", None)]
        yield "gathered_weights", [result.all_gather_output for result in gathering if result is not None]
        yield "buckets", [state.reduce_scatter_input for state in _listed(group.comm_ctx, "reduce_scatter_state")]


def fsdp_units(model) -> Iterator:
    """Yield FSDP2's units: groups of parameters that are gathered together."""
    for module in model.modules():
        # A state that several modules share belongs to the first of them.
        if hasattr(module, "_get_fsdp_state") and (state := module._get_fsdp_state())._modules[0] is module:
            yield from _listed(state, "_fsdp_param_group")


def _listed(holder, name: str) -> list:
    """Return what FSDP2 keeps under a name: since torch 2.12 a list, in 2.10 and 2.11 one object or None."""
    return getattr(holder, f"{name}s", None) or list(filter(None, [getattr(holder, name, None)]))


def fsdp_sizes(model) -> dict[str, int]:
    """Return the number of parameters of a model in FSDP1, and of those that this rank holds."""
    flat = list(flat_parameters(model))
    whole = sum(parameter._unpadded_unsharded_size.numel() for parameter in flat)
    held_parameters = sum(getattr(parameter, "_local_shard", parameter).numel() for parameter in flat)
    return {"parameters": whole, "held_parameters": held_parameters}


def describe_fsdp(model) -> dict:
    """Return how FSDP2 shards a model, as the record keeps it. Arms promise some of these values."""
    units = list(fsdp_units(model))
    stay = []
    if hasattr(model, "_get_fsdp_state") and (root := model._get_fsdp_state())._auto_reshard_after_forward:
        # By default the root's own unit stays gathered; FSDP2 decides that in the first forward pass.
        stay = _listed(root, "_fsdp_param_group")
    reshards = [unit for unit in units if unit.post_forward_mesh_info is not None and unit not in stay]
    policies = {unit.mp_policy for unit in units}
    return {
        "units": len(units),
        "units_resharded_after_forward": len(reshards),
        "mesh": [list(shape) for shape in sorted({tuple(unit.mesh_info.mesh.shape) for unit in units})],
        "offloads": any(type(unit.offload_policy).__name__ == "CPUOffloadPolicy" for unit in units),
        "gather_dtype": names(policy.param_dtype for policy in policies),
        "reduce_dtype": names(policy.reduce_dtype for policy in policies),
    }


def flat_parameters(model) -> Iterator:
    """Return the flat parameters of FSDP1."""
    for module in model.modules():
        handle: Any = getattr(module, "_handle", None)
        if hasattr(handle, "flat_param"):
            yield handle.flat_param


def names(dtypes) -> str | None:
    """Return the names of dtypes, without repetition. None: there is none, or FSDP2 keeps the parameters' own."""
    known = {str(dtype).removeprefix("torch.") for dtype in dtypes if dtype is not None}
    return " ".join(sorted(known)) or None
