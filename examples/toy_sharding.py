"""A toy of a sharding library, to show `study conform`: each rank owns every n-th parameter, and its optimizer state.

    study conform examples/toy_adapter.py

Gradients are averaged over the ranks. The owner of a parameter updates it, and sends it to the others. TOY_FAULT plants
a fault: "sum" does not divide by the number of ranks, "stale" forgets to send the last parameter, and "clip" computes
the norm from the parameters of one rank.
"""

import os

import torch
import torch.distributed as dist

FAULT = os.environ.get("TOY_FAULT", "")


class Sharded:
    """Wraps a model and its optimizer."""

    def __init__(self, model, optimizer, passes=1, limit=0.0):
        self.model, self.optimizer, self.passes, self.limit = model, optimizer, passes, limit
        self.parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self.ranks, self.rank, self.norm = dist.get_world_size(), dist.get_rank(), None
        for group in optimizer.param_groups:
            group["params"] = [each for each in group["params"] if self.owner(each) == self.rank]

    def owner(self, parameter):
        return next(i for i, each in enumerate(self.parameters) if each is parameter) % self.ranks

    def forward_backward(self, *batch):
        loss = self.model(*batch)
        (loss / self.passes).backward()
        return loss

    def average(self):
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            if FAULT != "sum":
                parameter.grad /= self.ranks

    def clip(self):
        counted = [each for each in self.parameters if FAULT != "clip" or self.owner(each) == self.rank]
        self.norm = torch.linalg.vector_norm(torch.stack([each.grad.norm() for each in counted]))
        if self.limit and self.norm > self.limit:
            for parameter in self.parameters:
                parameter.grad *= self.limit / (self.norm + 1e-6)

    def step(self):
        self.average()
        self.clip()
        self.optimizer.step()
        for parameter in self.parameters[: -1 if FAULT == "stale" else None]:
            dist.broadcast(parameter.data, self.owner(parameter))
        self.model.zero_grad()
