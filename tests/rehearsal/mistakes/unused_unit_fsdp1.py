# 2 tensors that should train get no gradient, such as unused.weight, unused.bias
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(8, 2), torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.used(x)


dist.init_process_group("nccl")
policy = ModuleWrapPolicy({torch.nn.Linear})
model = FullyShardedDataParallel(Two(), device_id=0, auto_wrap_policy=policy, use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(9):
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
