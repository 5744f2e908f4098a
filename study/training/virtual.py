"""Rank 0 of N in one process: its engine and buffers are real, its collectives move no data.

Its memory and its collective calls are those of a real rank. Its values are not: the other ranks' parts of the weights
and gradients are uninitialised memory, so a virtual run has no loss.
"""

import contextlib
import os
import types

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

from study.models.shapes import WithoutValues
from study.training.patches import applied, patched


def become_one_of(ranks: int) -> None:
    """Make this process rank 0 of a group whose other ranks do not exist."""
    # LOCAL_WORLD_SIZE is 1: DeepSpeed must not wait for neighbours on this machine in shared memory.
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "1"}
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


@contextlib.contextmanager
def without_values(sharded_by_fsdp: bool):
    """Within it tensors have shapes but no memory, so a laptop can show what a model of any size would do.

    The patches are for functions that read values or addresses: they compare values between ranks, or read, write and
    lock memory that does not exist.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
    from torch.nn.parallel import distributed

    begin = DeepSpeedCPUAdam.__init__

    def nothing(*_, **__) -> None:
        pass

    def without_its_operator(optimizer, *args, **kwargs):
        begin(optimizer, *args, **kwargs)
        optimizer.ds_opt_adam = types.SimpleNamespace(adam_update=lambda *_: None, destroy_adam=lambda *_: None)

    with (
        patched(coordinator, "assert_ints_same_as_other_ranks", nothing, "no_comparison_of_ints_between_ranks"),
        patched(distributed, "_verify_param_shape_across_processes", nothing, "no_comparison_of_shapes_between_ranks"),
        # DDP regroups its buckets after the first step, in agreement with the other ranks. Without that, the number of
        # calls may differ, but not the bytes.
        patched(dist.Reducer, "_rebuild_buckets", lambda *_, **__: False, "ddp_keeps_its_first_buckets"),
        # Everything is created on the right device.
        patched(torch.nn.Module, "to", lambda model, *_, **__: model, "models_are_not_moved"),
        patched(DeepSpeedCPUAdam, "__init__", without_its_operator, "cpu_adam_without_its_operator"),
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

    mesh = fully_shard._init_default_mesh()
    with (
        patched(fully_shard, "_init_default_mesh", lambda: mesh, "mesh_of_ranks_has_values"),
        # By it Accelerate finds an optimizer's parameters again, once FSDP2 has taken parts of them.
        patched(torch.Tensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata, "addresses_of_no_memory"),
    ):
        yield


def reduce_in_python(model) -> None:
    """Let DDP call its all-reduce from Python: its C++ code asks for a result, which the fake backend lacks."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model.register_comm_hook(None, _all_reduce)


def compare_no_rows(model) -> None:
    """Let AutoTP start without the rows of the ranks that do not exist: it compares those of its first pass."""
    if (hook := getattr(model, "first_dataloader_check", None)) is not None:
        applied.add("no_comparison_of_rows_between_ranks")
        hook.remove()


def _all_reduce(_, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(buffer)
    # The future must name the GPU of its tensor; a tensor without memory counts as having none.
    on_gpu = buffer.is_cuda and not isinstance(buffer, FakeTensor)
    done = torch.futures.Future(devices=[buffer.device] if on_gpu else [])
    done.set_result(buffer)
    return done
