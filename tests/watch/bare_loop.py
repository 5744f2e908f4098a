"""Somebody's loop without Accelerate, in DDP, FSDP or DeepSpeed."""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from study.watch import watch

args = dict(word.removeprefix("--").split("=") for word in sys.argv[1:])
kind = args["kind"]  # ddp, fsdp2, zero2, zero3
STEPS = 14

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)], torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
if kind == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
elif kind == "fsdp2":
    for layer in list(model)[:6]:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine = None
if kind.startswith("zero"):
    import deepspeed

    zero = {"stage": int(kind[-1]), "reduce_bucket_size": 100_000, "stage3_prefetch_bucket_size": 100_000}
    config = {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.0, "zero_optimization": zero}
    engine = model = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
rows = torch.randn(STEPS, 8, 64, generator=torch.Generator().manual_seed(rank))
losses = []


given = {"model": model, "optimizer": None if engine else optimizer, "run_dir": args["run_dir"]}
with watch(**given) if args["run_dir"] else contextlib.nullcontext():
    for step in range(STEPS):
        loss = model(rows[step]).pow(2).mean()
        (engine or torch.Tensor).backward(loss)
        (engine or optimizer).step()
        if not engine:
            optimizer.zero_grad()
        losses.append(loss.item())
if rank == 0:
    with open(args["losses"], "w") as file:  # noqa: PTH123
        file.write(" ".join(loss.hex() for loss in losses))
# The group is not destroyed: then DDP's reducer would own the last reference to it, and free it as the module ends.
# With torch 2.13 that waits, now and then for ever, for a thread of gloo that waits for Python's lock.
