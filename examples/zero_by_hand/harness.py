"""Starts the five files, counts what they hold, and prints it beside one process. To understand ZeRO, read those."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from one_process import SAMPLES, STEPS, OneProcess, Residual, train


def held_bytes(training):
    """Return the bytes of weights, gradients and moments that this rank holds now. A shared storage counts once."""
    optimizer = training.optimizer
    weights = [*training.model.parameters(), *(each for group in optimizer.param_groups for each in group["params"])]
    gradients = [each.grad for each in weights if each.grad is not None]
    moments = [each for state in optimizer.state.values() for each in state.values() if each.dim()]
    # A storage counts by its address in C++, `_cdata`: stage 3 frees the memory of some, and these have no other.
    storages = [{each.untyped_storage()._cdata: each for each in tensors} for tensors in (weights, gradients, moments)]
    return [sum(each.untyped_storage().nbytes() for each in unique.values()) for unique in storages]


def counted(kind, micro_batches, rank, ranks, sgd):
    """Train one of the five classes from seed 0. Return it, its losses, what it holds, and the peak."""

    class Counted(kind):
        def step(self):
            self.held = held_bytes(self)  # after the backward pass
            super().step()

    torch.manual_seed(0)  # the same weights and samples on each rank
    model = Residual()
    held = []  # at each gradient, before a stage's own hooks: it is whole, and so is its weight
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda *_: held.append(sum(held_bytes(training))))
    weights = model.parameters()
    optimizer = torch.optim.SGD(weights, lr=0.1) if sgd else torch.optim.Adam(weights, lr=0.001)
    optimizer.register_step_post_hook(lambda *_: held.append(sum(held_bytes(training))))  # and at each update
    training = Counted(model, optimizer, micro_batches)
    losses = train(training, rank, ranks)
    if ranks > 1:
        dist.all_reduce(losses)
    return training, losses.tolist(), max(held)


class Parser(argparse.ArgumentParser):
    """Below torchrun the first rank says what is wrong, and ends with 2: torchrun ends so, and adds its own lines."""

    def error(self, message):
        if "RANK" not in os.environ:
            super().error(message)
        if os.environ["RANK"] == "0":
            print(message, flush=True)
            if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun ends with what this says
                Path(file).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))
            sys.exit(2)
        sys.exit(0)  # another code here might end the first rank before it speaks


def refusal(name, ranks, micro_batches):
    """Return why this cannot be trained, if it cannot."""
    if name.startswith("Stage") and torch.__version__ < (2, 8):  # pytorch/pytorch#149869
        return f"PyTorch {torch.__version__} has no reduce_scatter on gloo: take 2.8 or later, or the notebook in Colab"
    if name == "OneProcess" and ranks > 1:
        return f"one_process.py is one process, not {ranks}: start it with python, or data_parallel.py with torchrun"
    if micro_batches < 1 or SAMPLES % (ranks * micro_batches):
        return f"{SAMPLES} samples do not divide by {ranks} ranks x {micro_batches} micro-batches: take others"
    return ""


def run(kind):
    """Train with one of the five classes, and print its losses, what it holds and sends, and how the losses compare."""
    parser = Parser()
    parser.add_argument("--micro-batches", type=int, default=1, help="of a step, of all its samples")
    parser.add_argument("--sgd", action="store_true", help="train with SGD: Adam hides a wrong scale of the gradients")
    asked = parser.parse_args()
    micro_batches = asked.micro_batches
    is_first = kind.__name__ == "OneProcess"  # started as a script its class is another than the imported one
    if not is_first and "RANK" not in os.environ:
        parser.error(f"start with torchrun --standalone --nproc-per-node 2 {sys.argv[0]}")
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if refused := refusal(kind.__name__, ranks, micro_batches):
        parser.error(refused)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    training, losses, peak = counted(kind, micro_batches, rank, ranks, asked.sgd)
    if rank == 0:
        name = f"{kind.__name__}, {ranks} rank{'s' if ranks > 1 else ''}"
        said = [f"{name}: " + " ".join(f"{loss:.7f}" for loss in losses)]
        weights, gradients, moments = training.held
        said += [f"held: weights {weights:,}, gradients {gradients:,}, moments {moments:,} bytes; peak {peak:,}"]
        said += [f"sent in a step: {training.sent_bytes // STEPS:,} bytes"]
        _, alone, _ = counted(OneProcess, 1, 0, 1, asked.sgd)  # DDP's losses, but for the last digit
        apart = max(abs(ours / theirs - 1) for ours, theirs in zip(losses, alone, strict=True))
        equal = "yes" if apart < 1e-6 else "NO"  # fp32 has seven digits, whatever the size of a loss
        if is_first:
            said += ["the other files are compared with these losses"]
        else:
            said += [f"equal to one process: {equal}, the losses differ by {apart:.0e} of their size at most"]
        if asked.sgd:
            said += ["with SGD"]
        elif not is_first and equal == "yes":
            said += ["Adam hides a wrong scale of the gradients: try --sgd as well"]
        print("\n".join(said) + "\n", end="", flush=True)  # in one write, as `| head -1` reads no second one
    if "RANK" in os.environ:
        dist.destroy_process_group()
        os._exit(0)  # gloo's threads abort some processes that end as usual (pytorch/pytorch#179291)
