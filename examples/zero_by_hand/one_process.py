"""Train in one process: weights, gradients and Adam's moments are all here.

The other files must give these losses, but for the last digit.

    python examples/zero_by_hand/one_process.py

Read on in this order: data_parallel.py, stage1.py, stage2.py, stage3.py. Each is the file before plus one idea.
`harness.py` starts, counts and prints for all of them: nobody needs to read it.
"""

import torch
from torch import nn

SAMPLES, WIDTH, LAYERS, STEPS = 96, 256, 4, 5  # samples of a step, of all ranks together


class OneProcess:
    """A model of P parameters in fp32, and its optimizer."""

    def __init__(self, model, optimizer, micro_batches=1):
        self.model = model  # weights: 4 P bytes
        self.optimizer = optimizer  # Adam's two moments: 8 P bytes from the first step on
        self.micro_batches = micro_batches  # of a step; each has samples of its own, and the gradients add up
        self.sent_bytes = 0

    def forward_backward(self, *batch):
        loss = self.model(*batch)
        (loss / self.micro_batches).backward()  # gradients: 4 P bytes
        return loss

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


class Residual(nn.Module):
    """A small model that takes samples and targets, and returns the loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])  # [WIDTH, WIDTH] and [WIDTH]

    def forward(self, hidden, targets):  # both [samples, WIDTH]
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return nn.functional.mse_loss(hidden, targets)


def train(training, rank=0, ranks=1):
    """Return the loss of each step: of this rank's samples, divided by the number of ranks."""
    losses = []
    for _ in range(STEPS):
        data = torch.randn(2, SAMPLES, WIDTH)  # samples and targets, the same on each rank
        mine = data.chunk(ranks, dim=1)[rank]  # each rank trains on its part of the samples
        parts = [training.forward_backward(*part).detach() for part in mine.chunk(training.micro_batches, dim=1)]
        training.step()
        losses.append(torch.stack(parts).mean() / ranks)
    return torch.stack(losses)


if __name__ == "__main__":
    from harness import run  # which imports this file

    run(OneProcess)
