# --config_file=accelerate_configs/zero2.yaml :: Clipping is 0 although the script calls clip_grad_norm_ with 1
# --config_file=accelerate_configs/zero2.yaml -- torch :: Clipping is 0 although the script calls clip_grad_norm_ with 1
import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,))), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
    (torch.nn.utils if sys.argv[1:] else accelerator).clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
