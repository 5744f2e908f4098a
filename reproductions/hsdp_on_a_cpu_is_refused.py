# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate==1.15.0", "torch==2.13.0"]
# ///
"""Claimed: "`dp_replicate_size > 1` and `dp_shard_size > 1`, we obtain Hybrid Sharded Data Parallel (HSDP)."
(Accelerate, docstring of ParallelismConfig).

What happens (accelerate 1.15.0 with torch 2.13.0), on four ranks without a GPU: ValueError, because Accelerate makes
FSDP on a CPU into DDP (see fsdp_on_a_cpu_is_ddp.py), and groups of ranks need FSDP2. Here it reports an error. PyTorch
itself accepts the same mesh. Not tried on a GPU.
"""

import json
import os

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="4", MASTER_ADDR="localhost", MASTER_PORT="0")

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)  # the other ranks are not needed
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False)
try:
    Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(2, 2))
    found, message = "accepted", ""
except ValueError as error:
    found, message = "ValueError", str(error)

model = torch.nn.Linear(8, 8, bias=False)
fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "within")))
by_torch = f"{model.weight.to_local().numel()} of {model.weight.numel()} weights on a rank"
print(json.dumps({"found": found, "message": message, "PyTorch itself": by_torch}), flush=True)
os._exit(0)
