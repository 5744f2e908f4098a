# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: stage 3 gathers and partitions the weights during the passes (DeepSpeed's ZeRO page, stage 3).

What happens (deepspeed 0.19.3 and 0.19.8, not in 0.19.2; probably since PR 8148): with frozen weights, as under LoRA,
and PyTorch's reentrant recomputation, what the backward pass gathers stays. With `use_reentrant=False` it is given
back. "found": frozen elements that a rank holds when the first layer gets its gradient.
"""

import json
import os
import sys

if "RANK" not in os.environ:  # starts itself on two ranks
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    os.execv(sys.executable, [*torchrun, __file__])
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import deepspeed
import torch
from torch.utils.checkpoint import checkpoint


class Model(torch.nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = torch.nn.Linear(1, 256)  # trained
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(256, 256) for _ in range(6)]).requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=self.reentrant)
        return hidden.sum()


def held(reentrant: bool) -> int:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
    zero |= {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    model, seen = Model(reentrant), []
    config = {"train_batch_size": 2, "zero_allow_untested_optimizer": True, "zero_optimization": zero}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.first.parameters()), config=config)
    model.first.register_full_backward_hook(lambda *_: seen.append(sum(w.numel() for w in model.blocks.parameters())))
    engine.backward(engine(torch.ones(1, 1)))
    return seen[-1]


found = {"found": held(True), "not_reentrant": held(False)}
print(json.dumps(found) if os.environ["RANK"] == "0" else "", flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
