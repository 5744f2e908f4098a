"""Data parallelism: each rank has its own samples and a whole copy of everything.

    torchrun --standalone --nproc-per-node 2 examples/zero_by_hand/data_parallel.py

The one idea: before the update, gradients become their mean over all ranks. So all ranks make the same update.
"""

import torch.distributed as dist
from harness import run


class DataParallel:
    """The weights must be equal on all ranks at the start: here by the same seed."""

    def __init__(self, model, optimizer, micro_batches=1):
        self.model = model  # 4 P bytes
        self.optimizer = optimizer  # 8 P bytes
        self.micro_batches = micro_batches
        self.ranks = dist.get_world_size()
        self.sent_bytes = 0

    def forward_backward(self, *batch):
        loss = self.model(*batch)
        (loss / self.micro_batches).backward()  # 4 P bytes
        return loss

    def step(self):
        for weight in self.model.parameters():
            if weight.grad is not None:
                self.average(weight.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def average(self, gradient):
        dist.all_reduce(gradient)  # each rank gets the sum: a ring sends it in 2 (N - 1) / N of its bytes
        gradient /= self.ranks
        self.sent_bytes += 2 * gradient.nbytes * (self.ranks - 1) // self.ranks


if __name__ == "__main__":
    run(DataParallel)
