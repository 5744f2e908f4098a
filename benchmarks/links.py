"""Measures the links between this machine's GPUs: all-reduces of all of them. Without a GPU, of gloo ranks.

torchrun --standalone --nproc-per-node 8 benchmarks/links.py

It prints JSON: for each size the bytes a second that each rank sends and receives, 2 (n - 1) / n of the size over the
median time, as nccl-tests count them. It stops after 30 s.
"""

import json
import os
import statistics
import time

import torch
import torch.distributed as dist

MOST_S = 30
TRIES = 10
CUDA = torch.cuda.is_available()


def main() -> None:
    if CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if CUDA else "gloo")
    ranks, began = dist.get_world_size(), time.monotonic()
    found = {}
    for size in (2**20, 2**24, 2**28, 2**30) if CUDA else (2**16, 2**20):
        tensor = torch.randn(size // 4, device="cuda" if CUDA else "cpu")
        seconds = []
        for _ in range(TRIES + 2):
            tensor.mul_(0.5)
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(tensor)
            if CUDA:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        found[size] = 2 * (ranks - 1) / ranks * size / statistics.median(seconds[2:])
        late = torch.tensor([time.monotonic() - began > MOST_S], dtype=torch.int32, device=tensor.device)
        dist.all_reduce(late)  # all ranks stop at the same size
        if late.item():
            break
    if dist.get_rank() == 0:
        print(json.dumps({"ranks": ranks, "all_reduce_bytes_per_s": found}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
