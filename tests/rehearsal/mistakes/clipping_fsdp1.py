# Each rank clips by the norm of its own part of the gradients
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("nccl")
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
model = FullyShardedDataParallel(model, device_id=0, use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(9):
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
