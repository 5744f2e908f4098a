"""ZeRO stage 3: weights are partitioned too.

    torchrun --standalone --nproc-per-node 2 examples/zero_by_hand/stage3.py

The one idea: a layer's weights are gathered before its forward and before its backward pass, and freed after each. Two
gathers and a reduce-scatter send 1.5 times as much as data parallelism. Nothing is gathered after the update.
"""

import torch
import torch.distributed as dist
from harness import run
from torch import nn


class Stage3:
    """Each weight of n elements lies in a flat tensor of N parts of equal size; the end of the last is padding."""

    def __init__(self, model, optimizer, micro_batches=1):
        self.model = model
        self.optimizer = optimizer  # 8 P / N bytes: it knows only the parts of this rank
        self.micro_batches = micro_batches
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.sent_bytes = 0
        self.flat = {}  # weight: the same elements and padding, [N * part], or no memory while it is freed
        self.part = {}  # weight: this rank's part of them, [part]; 4 P / N bytes
        for group in optimizer.param_groups:
            group["params"] = [self.cut(weight) for weight in group["params"]]
        for layer in model.modules():
            layer.register_forward_pre_hook(self.before_use)
            layer.register_forward_hook(self.after_forward)

    def cut(self, weight):
        flat = self.padded(weight.detach())
        weight.data = flat[: weight.numel()].view(weight.shape)  # the model now uses the flat tensor's storage
        self.flat[weight] = flat
        self.part[weight] = nn.Parameter(flat.chunk(self.ranks)[self.rank].clone())
        flat.untyped_storage().resize_(0)  # frees the memory; whatever views the storage keeps its shape
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
        self.flat[weight].untyped_storage().resize_(0)

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def gather(self, weight):
        flat = self.flat[weight]
        flat.untyped_storage().resize_(flat.nbytes)  # what autograd saved in the forward pass is this storage
        mine = self.part[weight].clone()
        dist.all_gather(list(flat.chunk(self.ranks)), mine)  # a ring sends (N - 1) / N of its bytes
        self.sent_bytes += flat.nbytes * (self.ranks - 1) // self.ranks

    # A weight is freed and filled again between the two passes. Only `step` changes parts, so its values are the same.
    # Autograd does not notice: it counts changes in place, and `weight.data = ...` gave the weight flat's storage, but
    # not flat's count. Exercise 8 of README shows what happens otherwise.
    def before_use(self, layer, *_):
        for weight in layer.parameters(recurse=False):
            self.gather(weight)

    def after_forward(self, layer, _, output):
        for weight in layer.parameters(recurse=False):
            self.flat[weight].untyped_storage().resize_(0)
        if output.requires_grad:  # its gradient comes right before the layer's backward pass
            output.register_hook(lambda _: self.before_use(layer))


if __name__ == "__main__":
    run(Stage3)
