# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: turning ZenFlow on is a change of configuration, and training goes on from the model's weights
(DeepSpeed's ZenFlow tutorial, section Configuration Changes; `deepspeed.initialize`).

What happens (deepspeed 0.19.8): before any step every matrix holds its transpose's values in its own shape. ZenFlow
flattens matrices transposed, and the weights are read back from the flat buffer as if they were not.
"""

import json
import logging
import os

logging.disable(logging.WARNING)
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import deepspeed
import torch

model = torch.nn.Linear(3, 2, bias=False)
before = model.weight.detach().clone()
zenflow = {"topk_ratio": 0.5, "update_interval": 4, "overlap_step": False}
config = {
    "train_batch_size": 1,
    "zero_allow_untested_optimizer": True,  # older releases call their ZenFlowCPUAdam so
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": zenflow},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
after = engine.module.weight.detach()
transposed = torch.equal(after, before.t().flatten().view_as(before))
print(json.dumps({"found": torch.equal(before, after), "transposed": transposed}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
