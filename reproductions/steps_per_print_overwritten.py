# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate==1.15.0", "deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: `steps_per_print` of a DeepSpeed config is how often DeepSpeed reports its progress
(DeepSpeed's configuration page, Logging; Accelerate's DeepSpeed guide has it in its example configs).

What happens (accelerate 1.15.0): Accelerate overwrites it with infinity, whatever the user's config says.
"""

import json
import logging
import os

logging.disable(logging.WARNING)
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin

config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "steps_per_print": 10}
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
model = torch.nn.Linear(8, 8)
engine, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
print(json.dumps({"found": str(engine.steps_per_print())}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
