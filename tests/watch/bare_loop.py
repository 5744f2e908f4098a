"""Somebody's loop, mostly without Accelerate: plain, in DDP, FSDP or DeepSpeed; it may end as loops that go wrong."""

import argparse
import contextlib
import os
import signal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from study.watch import watch

KINDS = ("plain", "ddp", "fsdp2", "zero2", "zero3")
parser = argparse.ArgumentParser()
parser.add_argument("--kind", default="plain", choices=KINDS)
parser.add_argument("--run_dir")  # without: the same loop without a watch
parser.add_argument("--steps", type=int, default=14)
parser.add_argument("--evaluate_in", type=int, nargs="*", default=[])
parser.add_argument("--end", choices=("error", "SIGINT"))
parser.add_argument("--losses")
args = parser.parse_args()

if args.kind != "plain":
    dist.init_process_group("gloo")
rank = dist.get_rank() if dist.is_initialized() else 0
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)], torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
if args.kind == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
elif args.kind == "fsdp2":
    for layer in list(model)[:6]:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine = None
if args.kind.startswith("zero"):
    import deepspeed

    zero = {"stage": int(args.kind[-1]), "reduce_bucket_size": 100_000, "stage3_prefetch_bucket_size": 100_000}
    config = {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.0, "zero_optimization": zero}
    engine = model = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
rows = torch.randn(args.steps, 8, 64, generator=torch.Generator().manual_seed(rank))
losses = []


def end() -> None:
    if args.end == "error":
        raise ValueError("the data has a hole")
    os.kill(os.getpid(), getattr(signal, args.end))


given = {"model": model, "optimizer": None if engine else optimizer, "run_dir": args.run_dir}
with watch(**given) if args.run_dir else contextlib.nullcontext():
    for step in range(args.steps):
        if args.end and step == 11:
            end()
        if step + 1 in args.evaluate_in:
            model.eval()
            with torch.no_grad():
                model(rows[0])
            model.train()
        loss = model(rows[step]).pow(2).mean()
        (engine or torch.Tensor).backward(loss)
        (engine or optimizer).step()
        if not engine:
            optimizer.zero_grad()
        losses.append(loss.item())
if args.losses and rank == 0:
    with open(args.losses, "w") as file:  # noqa: PTH123
        file.write(" ".join(loss.hex() for loss in losses))
if dist.is_initialized():
    dist.destroy_process_group()
