#  :: This line may hang when it is reached: \S*barrier_on_one_rank.py:19: torch.distributed.barrier\(\)
import os

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.distributed.init_process_group("gloo")
data = TensorDataset(torch.randn(640, 8), torch.randint(0, 2, (640,)))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
model = DDP(torch.nn.Linear(8, 512))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, (x, y) in enumerate(loader):
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    # The rehearsal ends before.
    if int(os.environ["RANK"]) == 0 and step == 100:
        torch.distributed.barrier()
