"""ZeRO stage 2: gradients are partitioned too.

    torchrun --standalone --nproc-per-node 2 examples/zero_by_hand/stage2.py

The one idea: each gradient is reduce-scattered as soon as the backward pass has it, and then freed. With one
micro-batch in a step that sends as much as data parallelism. But each micro-batch of a step reduces again.
"""

import torch
import torch.distributed as dist
from harness import run
from torch import nn


class Stage2:
    """Each weight of n elements lies in a flat tensor of N parts of equal size; the end of the last is padding."""

    def __init__(self, model, optimizer, micro_batches=1):
        self.model = model
        self.optimizer = optimizer  # 8 P / N bytes: it knows only the parts of this rank
        self.micro_batches = micro_batches
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.sent_bytes = 0
        self.flat = {}  # weight: the same elements and padding, [N * part]
        self.part = {}  # weight: this rank's part of them, [part]
        for group in optimizer.param_groups:
            group["params"] = [self.cut(weight) for weight in group["params"]]

    def cut(self, weight):
        flat = self.padded(weight.detach())
        weight.data = flat[: weight.numel()].view(weight.shape)  # the model now uses the flat tensor's storage
        self.flat[weight] = flat
        self.part[weight] = nn.Parameter(flat.chunk(self.ranks)[self.rank])
        weight.register_post_accumulate_grad_hook(self.reduce)  # is called when weight.grad is complete
        return self.part[weight]

    def padded(self, tensor):  # [...] -> [N * part]
        flat = tensor.new_zeros(-(-tensor.numel() // self.ranks) * self.ranks)  # -(-n // N) is n / N, rounded up
        flat[: tensor.numel()] = tensor.flatten()
        return flat

    def forward_backward(self, *batch):
        loss = self.model(*batch)
        (loss / self.micro_batches).backward()  # one whole gradient at a time; 4 P / N bytes stay
        return loss

    def reduce(self, weight):
        gradient, part = self.padded(weight.grad), self.part[weight]
        mine = torch.empty_like(part)
        dist.reduce_scatter(mine, list(gradient.chunk(self.ranks)))  # a ring sends (N - 1) / N of its bytes
        mine /= self.ranks
        self.sent_bytes += gradient.nbytes * (self.ranks - 1) // self.ranks
        part.grad = mine if part.grad is None else part.grad + mine
        weight.grad = None

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        for weight in self.part:
            self.gather(weight)

    @torch.no_grad()
    def gather(self, weight):
        flat = self.flat[weight]
        mine = self.part[weight].clone()
        dist.all_gather(list(flat.chunk(self.ranks)), mine)  # a ring sends (N - 1) / N of its bytes
        self.sent_bytes += flat.nbytes * (self.ranks - 1) // self.ranks


if __name__ == "__main__":
    run(Stage2)
