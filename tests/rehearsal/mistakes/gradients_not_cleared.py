# Gradients are not cleared: 2 of the first 3 steps began with those of the step before.*\[gradients_not_cleared\]
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator(mixed_precision="bf16")
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.randn(512, 8), batch_size=4))
for x in loader:
    accelerator.backward(model(x).square().mean())
    optimizer.step()
