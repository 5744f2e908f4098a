# Expected to have finished reduction in the prior iteration
# --config_file=accelerate_configs/zero1.yaml :: 2 tensors that should train get no gradient, such as unused.weight
# --config_file=accelerate_configs/zero2.yaml :: 2 tensors that should train get no gradient, such as unused.weight
# --config_file=accelerate_configs/zero3.yaml :: 2 tensors that should train get no gradient, such as unused.weight
# -- fsdp1 :: 2 tensors that should train get no gradient, such as unused.weight
# -- fsdp1_flat :: 2 tensors that should train get no gradient, such as unused.weight
# -- fsdp1_units :: 2 tensors that should train get no gradient, such as unused.weight
# -- fsdp2 :: 2 tensors that should train get no gradient, such as unused.weight
# -- fsdp2_units :: 2 tensors that should train get no gradient, such as unused.weight
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, TensorDataset


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(8, 2), torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.used(x)


model = Two()
kind = sys.argv[1] if len(sys.argv) > 1 else "prepared"
if kind == "prepared":
    accelerator = Accelerator()
else:
    dist.init_process_group("nccl")
if kind.startswith("fsdp1"):
    policy = ModuleWrapPolicy({torch.nn.Linear}) if kind == "fsdp1_units" else None
    whole = kind != "fsdp1_flat"
    model = FullyShardedDataParallel(model, device_id=0, auto_wrap_policy=policy, use_orig_params=whole)
if kind == "fsdp2_units":
    fully_shard(model.used)
    fully_shard(model.unused)
if kind.startswith("fsdp2"):
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,))), batch_size=4)
if kind == "prepared":
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    loss = torch.nn.functional.cross_entropy(model(x), y)
    accelerator.backward(loss) if kind == "prepared" else loss.backward()
    optimizer.step()
    optimizer.zero_grad()
