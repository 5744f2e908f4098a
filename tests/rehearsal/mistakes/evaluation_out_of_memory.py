# --evaluate --gpu=T4 :: in evaluation, and needs more than 15 GiB: it does not fit
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
model = torch.nn.Linear(64, 50000)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(64, 64), torch.randint(0, 2, (64,))), batch_size=4)
val = DataLoader(torch.randn(200000, 64), batch_size=4)
model, optimizer, loader, val = accelerator.prepare(model, optimizer, loader, val)
for x, y in loader:
    accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
model.eval()
outputs = []
with torch.no_grad():
    for x in val:
        outputs.append(model(x))
