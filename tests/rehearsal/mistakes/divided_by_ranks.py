# --ranks=4 :: The script divides its loss by 4, the number of ranks.*\[loss_divided_by_ranks\]
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("nccl")
model = DistributedDataParallel(torch.nn.Linear(8, 2).cuda(), device_ids=[0])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rows = torch.randn(64, 8)
for x in DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows)):
    loss = torch.nn.functional.cross_entropy(model(x.cuda()), torch.zeros(4, dtype=torch.int64).cuda())
    (loss / dist.get_world_size()).backward()
    optimizer.step()
    optimizer.zero_grad()
