# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate==1.15.0", "deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: `zero3_save_16bit_model` saves 16-bit weights under stage 3
(Accelerate's DeepSpeed guide, list of settings and Saving and loading; `accelerate launch --help`).

What happens (accelerate 1.15.0, deepspeed 0.19.8): it lets the weights be gathered, and converts nothing. A model that
trains in fp32 is saved in fp32, at twice the size.
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

accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3, zero3_save_16bit_model=True))
accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
model = torch.nn.Linear(8, 8)
engine, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
bits = torch.finfo(accelerator.get_state_dict(engine)["weight"].dtype).bits
print(json.dumps({"found": bits}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
