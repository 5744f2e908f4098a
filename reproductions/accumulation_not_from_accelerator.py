# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate==1.15.0", "deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: a `DeepSpeedPlugin` that is not told `gradient_accumulation_steps` takes the Accelerator's
(Accelerate, docstring of `DeepSpeedPlugin`).

What happens (accelerate 1.15.0): it does not, if it gets a DeepSpeed config without that key. It then sets 1, which
replaces the Accelerator's own value, with a warning.
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

config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
accelerator = Accelerator(gradient_accumulation_steps=4, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
model = torch.nn.Linear(8, 8)
engine, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
print(json.dumps({"found": engine.gradient_accumulation_steps()}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
