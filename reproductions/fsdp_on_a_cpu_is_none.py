# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate==1.15.0", "torch==2.13.0"]
# ///
"""Claimed: "We have integrated the latest PyTorch's Fully Sharded Data Parallel (FSDP) training feature. All you need
to do is enable it through the config" (Accelerate's usage guide of FSDP).

What happens (accelerate 1.15.0): without a GPU the config changes nothing. `Accelerator()` engages FSDP only if it has
found several GPUs or similar devices (state.py): each of two processes is alone (distributed_type NO), shards nothing,
and trains separately. No warning; exit code 0. With `cpu=True` it is DDP: see fsdp_on_a_cpu_is_ddp.py.
"""

import json
import os
import sys

CPU_ONLY = False  # what the script gives as `cpu`
if "RANK" not in os.environ:  # starts itself on two ranks, with what `accelerate launch` sets for FSDP2
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", CUDA_VISIBLE_DEVICES="")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    os.execv(sys.executable, [*torchrun, __file__])

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule

accelerator = Accelerator(cpu=CPU_ONLY)
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
    seen = {"distributed_type": accelerator.distributed_type.value, "wrapper": type(model).__name__}
    print(json.dumps({"found": isinstance(model, FSDPModule), "weights": weights, **seen}), flush=True)
dist.barrier()
os._exit(0)  # gloo's threads may abort an ordinary exit
