# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: parameters can be offloaded under stage 3 only, and what is not supported raises an assertion
(DeepSpeed's configuration page, Parameter offloading).

What happens (deepspeed 0.19.8): stage 2 takes `offload_param`, ignores it, and trains.
"""

import json
import logging
import os

logging.disable(logging.WARNING)
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import deepspeed
import torch

model = torch.nn.Linear(8, 8)
config = {"train_batch_size": 1, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
try:
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
    found = "accepted"
except Exception as error:
    found = f"rejected: {error}"
print(json.dumps({"found": found}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
