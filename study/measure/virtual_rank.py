"""Rank 0 of N, alone: a process group whose other ranks do not exist, and DDP without them."""

import os

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"


def become_virtual_rank(ranks: int, rank: int = 0) -> None:
    """Make this process a rank of a group whose other ranks do not exist."""
    # LOCAL_WORLD_SIZE is 1: DeepSpeed must not wait for neighbours on this machine in shared memory.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # nobody connects
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)


def all_reduce(_, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of a bucket, as DDP does in C++."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(buffer)
    # The future must name the GPU of its tensor; a tensor without memory counts as having none.
    on_gpu = buffer.is_cuda and not isinstance(buffer, FakeTensor)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device] if on_gpu else [])
    done.set_result(buffer)
    return done
