# its 48 steps end after 24 updates|takes 2 steps in an update
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup

accelerator = Accelerator()
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(128, 8), torch.randint(0, 2, (128,))), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
scheduler = accelerator.prepare(get_linear_schedule_with_warmup(optimizer, 0, 3 * len(loader)))
for _ in range(3):
    for x, y in loader:
        accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
