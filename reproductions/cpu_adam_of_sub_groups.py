# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: with `sub_group_size`, stage 3 takes the update in parts, to save memory (DeepSpeed's page on the config).

What happens (deepspeed 0.18.9, not in 0.19.8; PR 7982): CPU-Adam counts its calls, so it corrects the moments of the
first part of a step by a product, and those of the others by a power. Two equal parts with equal gradients become
unequal, in the last bits. "found": weights of 1,000 that differ after 200 steps.
"""

import json
import os

os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

torch.manual_seed(0)
weights = torch.randn(1_000)
parts = [torch.nn.Parameter(weights.clone()) for _ in range(2)]
optimizer = DeepSpeedCPUAdam(parts, lr=1e-3)
for _ in range(200):
    gradient = torch.randn(1_000)
    for part in parts:
        part.grad = gradient.clone()
    optimizer.step()

first, second = (part.detach() for part in parts)
found = {"found": int((first != second).sum()), "largest_difference": (first - second).abs().max().item()}
print(json.dumps(found))
