"""Reads how PyTorch's FSDP, version 1 or 2, shards a model and what it holds. The attributes are torch 2.13's."""

import sys
from collections.abc import Iterator

import torch


def version(model) -> int | None:
    """1 or 2; None without FSDP."""
    if "torch.distributed.fsdp" not in sys.modules:
        return None
    modules = list(model.modules())
    if any(hasattr(module, "_get_fsdp_state") for module in modules):
        return 2
    return 1 if any(hasattr(getattr(module, "_handle", None), "flat_param") for module in modules) else None


def tensors(model) -> Iterator[tuple[str, object]]:
    """The tensors that FSDP holds of a model, by role."""
    for parameter in _flat_parameters(model):
        yield "weights", getattr(parameter, "_local_shard", parameter.data)  # from the first pass on
        yield "gathered_weights", getattr(parameter, "_full_param_padded", None)
        yield "gradients", getattr(parameter, "_saved_grad_shard", None)
    for group in groups(model):
        for parameter in group.fsdp_params:
            yield "weights", parameter._sharded_param_data
            yield "gathered_weights", parameter.all_gather_outputs
            yield "gradients", parameter.sharded_param.grad
            whole = getattr(parameter, "_unsharded_param", None)  # holds gradients of passes that reduce nothing
            yield "gradients", [getattr(whole, "grad", None), parameter.unsharded_accumulated_grad]
        gathering = [group._all_gather_result, getattr(group.comm_ctx.all_gather_state, "all_gather_result", None)]
        yield "gathered_weights", [result.all_gather_output for result in gathering if result is not None]
        yield "buckets", [state.reduce_scatter_input for state in group.comm_ctx.reduce_scatter_states]


def groups(model) -> Iterator:
    """FSDP2's units: groups of parameters that are gathered together."""
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state") and (state := module._get_fsdp_state())._modules[0] is module:
            yield from state._fsdp_param_groups


def sizes(model) -> dict[str, int]:
    """The number of parameters of a model in FSDP1, and of those that this rank holds."""
    flat = list(_flat_parameters(model))
    whole = sum(parameter._unpadded_unsharded_size.numel() for parameter in flat)
    held = sum(getattr(parameter, "_local_shard", parameter).numel() for parameter in flat)
    return {"parameters": whole, "held_parameters": held}


def describe(model) -> dict:
    """How FSDP2 shards a model, as the record keeps it. Arms promise some of these values."""
    units = list(groups(model))
    root = model._get_fsdp_state() if hasattr(model, "_get_fsdp_state") else None
    # By default the root's own unit stays gathered; FSDP2 decides that in the first forward pass.
    stay = root._fsdp_param_groups if root is not None and root._auto_reshard_after_forward else ()
    reshards = [unit for unit in units if unit.post_forward_mesh_info is not None and unit not in stay]
    policies = {unit.mp_policy for unit in units}
    return {
        "version": 2,
        "units": len(units),
        "units_resharded_after_forward": len(reshards),
        "mesh": [list(shape) for shape in sorted({tuple(unit.mesh_info.mesh.shape) for unit in units})],
        "offloads": any(type(unit.offload_policy).__name__ == "CPUOffloadPolicy" for unit in units),
        "gather_dtype": _names(policy.param_dtype for policy in policies),
        "reduce_dtype": _names(policy.reduce_dtype for policy in policies),
        "output_dtype": _names(policy.output_dtype for policy in policies),
    }


def _flat_parameters(model) -> Iterator:
    """The flat parameters of FSDP1."""
    for module in model.modules():
        if (handle := getattr(module, "_handle", None)) is not None and hasattr(handle, "flat_param"):
            yield handle.flat_param


def _names(dtypes) -> str | None:
    """The names of dtypes. None: the parameters' own dtype."""
    names = {str(dtype).removeprefix("torch.") for dtype in dtypes if isinstance(dtype, torch.dtype)}
    return " ".join(sorted(names)) or None
