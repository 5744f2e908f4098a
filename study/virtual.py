"""Rank 0 of N, alone in one process: the engine and all its buffers are real, its collectives move nothing.

What it holds and which collectives it calls are a real rank's. What it computes is not: the other ranks' parts of the
weights and gradients are whatever memory held, so a virtual run has no loss.
"""

import os

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"


def become_one_of(ranks: int) -> None:
    """Make this process rank 0 of a group of so many, of which there are no others."""
    # LOCAL_WORLD_SIZE is 1: DeepSpeed must not wait for neighbours on this machine in shared memory.
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "1"}
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def reduce_in_python(model) -> None:
    """Let DDP call its all-reduce from here: its own C++ asks the fake one for a result, which it does not have."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model.register_comm_hook(None, _all_reduce)


def _all_reduce(_, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(buffer)
    done = torch.futures.Future()
    done.set_result(buffer)
    return done
