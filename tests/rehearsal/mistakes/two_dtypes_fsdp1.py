# Must flatten tensors with uniform dtype
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("nccl")
model = torch.nn.Sequential(torch.nn.Linear(8, 8).bfloat16(), torch.nn.Linear(8, 2))
model = FullyShardedDataParallel(model, device_id=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(9):
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
