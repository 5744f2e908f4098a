"""Train in one process: weights, gradients and Adam's moments are all here.

The other files must give these losses, but for the last digit: each trains this one as well, and says whether it is so.

    python examples/zero_by_hand/one_process.py

Read on in this order: data_parallel.py, stage1.py, stage2.py, stage3.py. Each is the file before plus one idea.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
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


def held_bytes(training):
    """Return the bytes of weights, gradients and moments that this rank holds now. A shared storage counts once."""
    optimizer = training.optimizer
    weights = [*training.model.parameters(), *(each for group in optimizer.param_groups for each in group["params"])]
    gradients = [each.grad for each in weights if each.grad is not None]
    moments = [each for state in optimizer.state.values() for each in state.values() if each.dim()]
    # A storage counts by its address in C++, `_cdata`: stage 3 frees the memory of some, and these have no other.
    storages = [{each.untyped_storage()._cdata: each for each in tensors} for tensors in (weights, gradients, moments)]
    return [sum(each.untyped_storage().nbytes() for each in unique.values()) for unique in storages]


def train(kind, micro_batches, rank, ranks, sgd):
    """Train one of the five classes from seed 0. Return it, its losses and bytes: what it holds, and the peak."""
    torch.manual_seed(0)  # the same weights and samples on each rank
    model = Residual()
    held = []  # at each gradient, before a stage's own hooks: it is whole, and so is its weight
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda *_: held.append(sum(held_bytes(training))))
    weights = model.parameters()
    optimizer = torch.optim.SGD(weights, lr=0.1) if sgd else torch.optim.Adam(weights, lr=0.001)
    optimizer.register_step_post_hook(lambda *_: held.append(sum(held_bytes(training))))  # and at each update
    training = kind(model, optimizer, micro_batches)
    losses = []
    for _ in range(STEPS):
        data = torch.randn(2, SAMPLES, WIDTH)
        mine = data.chunk(ranks, dim=1)[rank]  # each rank trains on its part of the samples
        parts = [training.forward_backward(*part).detach() for part in mine.chunk(micro_batches, dim=1)]
        loss = torch.stack(parts).mean() / ranks
        weights, gradients, _ = held_bytes(training)
        training.step()
        if ranks > 1:
            dist.all_reduce(loss)
        losses.append(loss.item())
    return training, losses, (weights, gradients, held_bytes(training)[2], max(held))


def run(kind):
    """Train with one of the five classes, and print its losses, what it holds and sends, and how the losses compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batches", type=int, default=1, help="of a step, of all its samples")
    parser.add_argument("--sgd", action="store_true", help="train with SGD: Adam hides a wrong scale of the gradients")
    asked = parser.parse_args()
    micro_batches = asked.micro_batches
    if kind is not OneProcess and "RANK" not in os.environ:
        parser.error(f"start with torchrun --standalone --nproc-per-node 2 {sys.argv[0]}")
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if micro_batches < 1 or SAMPLES % (ranks * micro_batches):
        if rank == 0:
            print(f"{SAMPLES} samples do not divide by {ranks} ranks x {micro_batches} micro-batches: take others")
        return  # with exit code 0: with another, torchrun writes forty lines below the sentence
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    training, losses, (weights, gradients, moments, peak) = train(kind, micro_batches, rank, ranks, asked.sgd)
    if rank == 0:
        print(f"{kind.__name__}, {ranks} rank{'s' if ranks > 1 else ''}: " + " ".join(f"{loss:.7f}" for loss in losses))
        print(f"held: weights {weights:,}, gradients {gradients:,}, moments {moments:,} bytes; peak {peak:,}")
        print(f"sent in a step: {training.sent_bytes // STEPS:,} bytes")
        _, alone, _ = train(OneProcess, 1, 0, 1, asked.sgd)  # DDP's losses, but for the last digit
        apart = max(abs(ours / theirs - 1) for ours, theirs in zip(losses, alone, strict=True))
        equal = "yes" if apart < 1e-6 else "NO"  # fp32 has seven digits, whatever the size of a loss
        if kind is OneProcess:
            print("the other files are compared with these losses", flush=True)
        else:
            print(f"equal to one process: {equal}, the losses differ by {apart:.0e} of their size at most", flush=True)
        if asked.sgd:
            print("with SGD", flush=True)
        elif kind is not OneProcess and equal == "yes":
            print("Adam hides a wrong scale of the gradients: try --sgd as well", flush=True)
    if "RANK" in os.environ:
        dist.destroy_process_group()
        os._exit(0)  # gloo's threads abort some processes that end as usual (pytorch/pytorch#179291)


if __name__ == "__main__":
    run(OneProcess)
