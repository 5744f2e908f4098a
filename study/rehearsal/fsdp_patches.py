"""How PyTorch's two ways to shard run as rank 0 of N without a GPU."""

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from study.rehearsal import gpu
from study.rehearsal.libraries import Rehearsal


def patch_fsdp2(rehearsal: Rehearsal) -> None:
    from torch.distributed import device_mesh, fsdp
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fsdp_state, _fully_shard
    from torch.distributed.tensor import _sharding_prop

    begin_mesh = device_mesh.DeviceMesh.__init__

    def begin_on_one_device(mesh, device_type: str, *args, **kwargs) -> None:
        with rehearsal.shapes.not_only():  # its ranks are values, as where FSDP2 joins its mesh to a tensor's
            begin_mesh(mesh, gpu.on_cpu(device_type), *args, **kwargs)

    find = _sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached

    def find_shapes(propagator, op_schema):
        # A new operation runs once on fake tensors of whole weights, which take no memory and are not counted.
        with _disable_current_modes():
            return find(propagator, op_schema)

    if rehearsal.on_cpu:
        device_mesh.DeviceMesh.__init__ = begin_on_one_device  # type: ignore[method-assign, assignment]
    make_mesh = _fully_shard._init_default_mesh
    shard = rehearsal.shapes.wrap(_fully_shard.fully_shard)
    meshes: list[Any] = []  # one, made outside of the mode without values, and handed out to each module

    def fully_shard(*args, **kwargs):
        if not meshes:
            meshes.append(make_mesh())
        return shard(*args, **kwargs)

    fully_shard.state = _fully_shard.fully_shard.state  # type: ignore[attr-defined]
    _fully_shard._init_default_mesh = lambda *_: meshes[0]
    fsdp.fully_shard = _fully_shard.fully_shard = fully_shard
    for owner in (_fsdp_param.FSDPParam, _fsdp_param_group.FSDPParamGroup, _fsdp_state.FSDPState):
        rehearsal.shapes.wrap_all(owner)
    _sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached = find_shapes  # type: ignore[method-assign]


def patch_fsdp1(rehearsal: Rehearsal) -> None:
    """FSDP1 asks for a GPU by the streams of its device. Its weights are one flat tensor for each unit."""
    from torch.distributed.fsdp import _flat_param, _init_utils, _runtime_utils, fully_sharded_data_parallel

    module: Any = fully_sharded_data_parallel
    for owner, name in (
        (module.FullyShardedDataParallel, "__init__"), (module.FullyShardedDataParallel, "clip_grad_norm_"),
        (_runtime_utils, "_reduce_grad"), (_runtime_utils, "_reduce_grad_no_shard"),
        (_runtime_utils, "_unshard"), (_runtime_utils, "_unshard_grads"), (_runtime_utils, "_reshard"),
    ):  # fmt: skip
        setattr(owner, name, rehearsal.shapes.wrap(getattr(owner, name)))
    flat: Any = _flat_param
    rehearsal.shapes.wrap_all(flat.FlatParamHandle)
    use_views = flat.FlatParamHandle._use_unsharded_views

    def use_and_follow(handle, as_params: bool) -> None:
        use_views(handle, as_params)
        if not as_params:
            rehearsal.count.mistakes.follow_views(handle)

    flat.FlatParamHandle._use_unsharded_views = use_and_follow
    # What stays gathered, as with SHARD_GRAD_OP, must have memory: without values it has no address.
    flat._data_ptr_allocated = lambda tensor: tensor.untyped_storage().size() > 0
    if not rehearsal.on_cpu:
        return

    def use_streams_of_nothing(state, *_) -> Any:
        state._device_handle = DEVICE
        return state

    host = torch.device("cpu")
    flat.FlatParamHandle.to_cpu = lambda _: contextlib.nullcontext()  # it frees what it has moved
    initial: Any = _init_utils
    module._init_device_handle = use_streams_of_nothing
    initial._check_module_states_for_sync_module_states = lambda *_: None
    initial._get_device_from_device_id = initial._get_compute_device = lambda *_: host
    for owner in (_flat_param, _runtime_utils):
        vars(owner)["_no_dispatch_record_stream"] = lambda *_: None


# What FSDP1 asks of a GPU: streams, in which everything happens at once.
DEVICE = SimpleNamespace(
    Stream=gpu.Stream,
    Event=gpu.Stream,
    stream=gpu.Stream,
    current_stream=gpu.Stream,
    is_available=lambda: True,
    current_device=lambda: torch.device("cpu"),
    device_count=lambda: 1,
    synchronize=lambda: None,
)
