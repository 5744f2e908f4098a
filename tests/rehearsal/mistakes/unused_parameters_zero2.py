# --config_file=accelerate_configs/zero2.yaml :: 2 tensors that should train get no gradient, such as unused.weight
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(8, 2), torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.used(x)


accelerator = Accelerator()
model = Two()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,))), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
