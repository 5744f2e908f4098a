# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "numpy"]
# ///
"""Claimed: DDP gives each parameter the mean of the ranks' gradients (its page).

What happens (torch 2.13.0, gloo on CPUs; NCCL was not tried): it divides an embedding's sparse gradient in place, whose
memory is the gradient of a sum. A layer called before gets that too. "found": its gradient, over the right one.
"""

import json
import os
import sys

if "RANK" not in os.environ:  # starts itself on two ranks
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    os.execv(sys.executable, [*torchrun, __file__])

import torch
from torch.nn.parallel import DistributedDataParallel


class Model(torch.nn.ModuleDict):
    def forward(self, copied: bool) -> torch.Tensor:
        hidden, words = self["linear"](torch.ones(1, 1)), self["embedding"](torch.tensor([0]))
        return (hidden + (words * 1.0 if copied else words)).exp().sum()


def share(copied: bool = False, sparse: bool = True) -> float:
    model = Model({"linear": torch.nn.Linear(1, 1), "embedding": torch.nn.Embedding(1, 1, sparse=sparse)})
    ddp = DistributedDataParallel(model)
    (loss := ddp(copied)).backward()  # on all ranks the same, and its own gradient
    return round(float(model["linear"].bias.grad / loss.detach()), 3)


torch.distributed.init_process_group("gloo")
found = {"found": share(), "dense": share(sparse=False), "copied": share(copied=True)}  # the last two are controls
assert [*found.values()] == [0.5, 1.0, 1.0], found
print(json.dumps(found) if os.environ["RANK"] == "0" else "", flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
