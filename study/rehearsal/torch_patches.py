"""How PyTorch runs as rank 0 of N without a GPU: DDP, loaders, optimizers, saving."""

import contextlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import distributed as ddp
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from study.measure.virtual_rank import all_reduce
from study.rehearsal.fsdp_patches import patch_fsdp1, patch_fsdp2
from study.rehearsal.libraries import Rehearsal

TORCH: Any = torch  # whose parts are replaced


def patch(rehearsal: Rehearsal) -> None:
    patch_ddp(rehearsal)
    patch_loaders(rehearsal)
    patch_optimizers(rehearsal)
    patch_fsdp2(rehearsal)
    patch_fsdp1(rehearsal)
    # A script that starts its own ranks: this process is one of them.
    TORCH.multiprocessing.spawn = lambda function, args=(), *_, **__: function(rehearsal.request.rank, *args)
    TORCH.save = saving(torch.save)
    rehearsal.count.moments.wrap(torch, "save")
    if not rehearsal.request.real:
        TORCH.load = loading(torch.load, rehearsal)
        patch_what_reads_values()
        patch_downloads()


def patch_ddp(rehearsal: Rehearsal) -> None:
    parallel: Any = ddp
    # In agreement with the other ranks, DDP would regroup its buckets after the first step.
    TORCH.distributed.Reducer._rebuild_buckets = lambda *_, **__: False
    parallel._verify_param_shape_across_processes = lambda *_, **__: None
    begin = rehearsal.shapes.wrap(ddp.DistributedDataParallel.__init__)
    watch = rehearsal.count.watch

    def wrap_in_ddp(model, module, device_ids=None, output_device=None, *args, **kwargs) -> None:
        made = watch.made
        if rehearsal.on_cpu:
            device_ids = output_device = None
        begin(model, module, device_ids, output_device, *args, **kwargs)
        watch.of_the_backward_pass(made)  # its buckets, which real ranks make anew in their first pass
        model.register_comm_hook(None, all_reduce)  # its C++ code needs a result that the fake backend lacks
        model.register_comm_hook = lambda *_, **__: None  # a script's own would wait for one, too; its copies are small

    parallel.DistributedDataParallel.__init__ = wrap_in_ddp


def patch_loaders(rehearsal: Rehearsal) -> None:
    take = torch.utils.data.dataloader._BaseDataLoaderIter.__next__
    count = rehearsal.count

    def next_batch(loader):
        count.moments.begin_batch(loader)
        batch = count.lengths.lengthen(loader, take(loader))
        count.take_batch(batch)
        return batch

    TORCH.utils.data.dataloader._BaseDataLoaderIter.__next__ = next_batch


def patch_optimizers(rehearsal: Rehearsal) -> None:
    shapes = rehearsal.shapes
    make = torch.optim.Optimizer.profile_hook_step

    def with_values(step):
        hooked = make(step)

        def call(*args, **kwargs):
            with shapes.not_only():
                return hooked(*args, **kwargs)

        return call

    TORCH.optim.Optimizer.profile_hook_step = staticmethod(with_values)
    if rehearsal.request.real or not rehearsal.request.gpu:
        return
    # A GPU's default is an update of all tensors at once (torch/optim/optimizer.py).
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.optim.") and hasattr(module, "_default_to_fused_or_foreach"):
            vars(module)["_default_to_fused_or_foreach"] = lambda *_, **__: (False, True)


def patch_what_reads_values() -> None:
    parallel: Any = ddp
    TORCH.Tensor.data_ptr = address
    TORCH.distributions.Distribution.set_default_validate_args(False)
    # It keeps what the plain one keeps, and has kernels for a GPU alone.
    TORCH.nn.SyncBatchNorm.forward = torch.nn.modules.batchnorm._BatchNorm.forward
    parallel.DistributedDataParallel._passing_sync_batchnorm_handle = lambda *_: None
    FakeTensor.__deepcopy__ = copied  # type: ignore[method-assign, assignment]
    for name in filter(re.compile("[a-z].*_$").match, dir(torch.nn.init)):
        setattr(torch.nn.init, name, initializing(getattr(torch.nn.init, name)))


class NotDownloaded(dict):
    """Weights that a script would download. They have no values here, and so are not needed."""


def patch_downloads() -> None:
    """Download no weights, and let models that load them stay as they are."""
    load = torch.nn.Module.load_state_dict

    def load_state_dict(module, state_dict, *args, **kwargs):
        if isinstance(state_dict, NotDownloaded):
            state_dict = module.state_dict()
        return load(module, state_dict, *args, **kwargs)

    TORCH.nn.Module.load_state_dict = load_state_dict
    TORCH.hub.load_state_dict_from_url = lambda *_, **__: NotDownloaded()


read_address = torch.Tensor.data_ptr


def address(tensor: torch.Tensor) -> int:
    """Return where a tensor is. Accelerate and others tell tensors without memory apart by it, too."""
    local = getattr(tensor, "_local_tensor", tensor)
    if isinstance(local, FakeTensor):
        return local.untyped_storage()._cdata
    return read_address(tensor)


copy_tensor = torch.Tensor.__deepcopy__


def copied(tensor: FakeTensor, memo: dict) -> torch.Tensor:
    """Return a copy of a tensor without values. A parameter's is without its attributes, as `nn.Parameter` has it."""
    if id(tensor) not in memo and isinstance(tensor, torch.nn.Parameter):
        memo[id(tensor)] = torch.nn.Parameter(tensor.data.clone(), tensor.requires_grad)
    return memo[id(tensor)] if id(tensor) in memo else copy_tensor(tensor, memo)


def initializing(function: Callable) -> Callable:
    """Return a function of `nn.init` that leaves a weight without values as it is."""

    def initialize(tensor, *args, **kwargs):
        if isinstance(getattr(tensor, "_local_tensor", tensor), FakeTensor):
            return tensor
        return function(tensor, *args, **kwargs)

    return initialize


def saving(save: Callable) -> Callable:
    """Return a `torch.save` that keeps of what has no values its shapes. The files are removed afterwards."""

    def save_shapes(obj, f, *args, **kwargs) -> None:
        # DTensors and whole objects have no values inside, and nobody loads them again at once.
        whole = (torch.nn.Module, torch.optim.Optimizer, DTensor)
        if any(isinstance(leaf, whole) for leaf in tree_leaves(obj)):
            obj = None
        # PyTorch opens a path in C++, where nobody keeps the user's file.
        is_path = isinstance(f, str | os.PathLike)
        with Path(f).open("wb") if is_path else contextlib.nullcontext(f) as written, _disable_current_modes():
            save(tree_map_only(FakeTensor, lambda each: empty_like(each, "meta"), obj), written, *args, **kwargs)

    return save_shapes


def loading(load: Callable, rehearsal: Rehearsal) -> Callable:
    """Return a `torch.load` that gives what `saving` has kept, and all else on the one device that there is."""

    def load_shapes(f, map_location=None, *args, **kwargs):
        content = load(f, "cpu", *args, **kwargs)
        with rehearsal.shapes.only(), rehearsal.count.moments.made_on_host():
            return tree_map_only(torch.Tensor, lambda each: empty_like(each, "cpu") if each.is_meta else each, content)

    return load_shapes


def empty_like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
