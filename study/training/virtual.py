"""Runs rank 0 of N in one process, with a real engine and real buffers, and collectives that move no data.

Its memory and its collective calls are those of a real rank, but its values are not: the other ranks' parts of weights
and gradients are uninitialised memory. So a virtual run has no loss.
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
    """Give tensors shapes but no memory, so that a laptop can show what a model of any size would do.

    The patches replace functions that compare values between ranks, or that access memory which does not exist.
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
        # DDP regroups its buckets after the first step, in agreement with the other ranks. Without regrouping, the
        # number of calls may differ, but not the bytes.
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
        # Accelerate uses the address to find an optimizer's parameters again after FSDP2 has sharded them.
        patched(torch.Tensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata, "addresses_of_no_memory"),
    ):
        yield


def reduce_in_python(model) -> None:
    """Let DDP call its all-reduce from Python, because its C++ code needs a result that the fake backend lacks."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model.register_comm_hook(None, _all_reduce)


def compare_no_rows(model) -> None:
    """Keep AutoTP from comparing the rows of its first pass with those of ranks that do not exist."""
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
