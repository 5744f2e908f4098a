# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: stage 0 is ZeRO switched off, and bf16 is set by one option alike for all stages
(DeepSpeed's configuration page, `stage` and BFLOAT16 training options).

What happens (deepspeed 0.19.8): under stage 0 the first update is smaller than under stages 1 to 3. Stage 0 allocates
Adam's moments with a step on zero gradients, so Adam has counted one step and its bias correction is one step ahead:
the update is sqrt(1 + b2) / (1 + b1) = 0.744 of what it should be.
"""

import json
import logging
import os

logging.disable(logging.WARNING)
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import deepspeed
import torch


def first_update(stage: int) -> float:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    adam = torch.optim.Adam(model.parameters(), lr=1.0)
    config = {"train_batch_size": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)
    engine.backward(engine(torch.ones(1, 1, dtype=torch.bfloat16)).sum())
    engine.step()
    with deepspeed.zero.GatheredParameters(engine.module.weight, enabled=stage == 3):
        return -engine.module.weight.item()


updates = {stage: first_update(stage) for stage in (0, 1, 2, 3)}
print(json.dumps({"found": updates[0] / updates[1], "first_update_by_stage": updates}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
