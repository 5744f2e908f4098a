"""Claimed: DeepSpeed's WarmupDecayLR is Transformers' linear schedule with warm-up
(Transformers' DeepSpeed guide of version 4, Optimizer and scheduler; the guides of version 5 use it the same way).

What happens (deepspeed 0.19.8): it warms up by a logarithm unless `warmup_type` is "linear", which neither guide sets
and "auto" does not fill: after one of 100 warm-up steps the rate is 15 times that of the linear schedule.
"""

import json
import logging
import os

logging.disable(logging.WARNING)
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import torch
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from transformers import get_linear_schedule_with_warmup

ours, theirs = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1e-3) for _ in range(2))
linear = get_linear_schedule_with_warmup(ours, num_warmup_steps=100, num_training_steps=1000)
deepspeed = WarmupDecayLR(theirs, total_num_steps=1000, warmup_min_lr=0, warmup_max_lr=1e-3, warmup_num_steps=100)
deepspeed.step()  # its first value is that of step 0
rates = []
for _ in range(1000):
    rates.append((linear.get_last_lr()[0], deepspeed.get_last_lr()[0]))
    ours.step()
    theirs.step()
    linear.step()
    deepspeed.step()
largest = max(abs(a - b) for a, b in rates) / 1e-3
print(json.dumps({"found": largest, "after_one_step": rates[1][1] / rates[1][0]}))
