# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: stage 3 reduces each gradient as soon as it is there (DeepSpeed's ZeRO page).

What happens (deepspeed 0.18.5 and 0.18.6, not in 0.18.4, 0.18.7 and 0.19.8; issue 7885): the hook of each gradient
counts all parameters again, so a backward pass looks at the square of their number. "found": how often the parameters
are counted in a backward pass with 64 of them.
"""

import json
import os

os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")

import deepspeed
import torch
from deepspeed.runtime.zero import stage3

calls = []
count = stage3.count_used_parameters_in_backward
stage3.count_used_parameters_in_backward = lambda parameters: calls.append(len(parameters)) or count(parameters)

model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(32)])
config = {"train_batch_size": 1, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 3}}
optimizer = torch.optim.AdamW(model.parameters())
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
engine.backward(engine(torch.ones(1, 8)).sum())

print(json.dumps({"found": len(calls), "parameters": len(list(model.parameters()))}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
