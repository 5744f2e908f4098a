# The optimizer updates no tensor of the model
# -- eval :: The optimizer updates no tensor of the model
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if "eval" in sys.argv:  # as from_pretrained leaves it
    model.eval()
for layer in model:
    fully_shard(layer)
fully_shard(model)
for _ in range(9):
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
