# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate==1.15.0", "torch==2.13.0"]
# ///
"""Claimed: the same script trains on any distributed setup, started by `accelerate launch` or torchrun
(Accelerate's quick tour and its page on launching; `Accelerator.prepare`).

What happens (accelerate 1.15.0): of two processes without a GPU, each `Accelerator()` takes itself for the only
one (distributed_type NO, one process), wraps nothing, and trains separately. Both end with exit code 0. The same
happens with `accelerate launch --multi_gpu --num_processes 2`; `Accelerator(cpu=True)` makes them one training.
"""

import json
import os
import sys

if "RANK" not in os.environ:  # starts itself on two ranks
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    os.execv(sys.executable, [*torchrun, __file__])
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch.distributed as dist
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(1, 1)
torch.nn.init.zeros_(model.weight)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
accelerator.backward(model(torch.tensor([[1.0 + int(os.environ["RANK"])]])).sum())  # another row on each rank
optimizer.step()
weight = next(model.parameters()).item()
if not dist.is_initialized():
    dist.init_process_group("gloo")
weights = [None, None]
dist.all_gather_object(weights, weight)
if dist.get_rank() == 0:
    seen = {"distributed_type": accelerator.distributed_type.value, "num_processes": accelerator.num_processes}
    print(json.dumps({"found": weights[0] == weights[1], "weights": weights, **seen}), flush=True)
dist.barrier()
os._exit(0)  # gloo's threads may abort an ordinary exit
