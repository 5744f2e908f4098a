# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate==1.15.0", "deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: `gradient_clipping` of an Accelerate yaml, or of `DeepSpeedPlugin`, is the norm to clip at, and 0.0 is off
(Accelerate's DeepSpeed guide, list of settings; DeepSpeed's constants say of its config that 0.0 turns it off).

What happens (accelerate 1.15.0, deepspeed 0.19.8): the plugin drops a value that is 0, and DeepSpeed's default, 1.0
since 0.19, clips. Off is -1.0 in the yaml, or 0.0 in a DeepSpeed json.
"""

import json
import logging
import os

logging.disable(logging.WARNING)
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
os.environ["ACCELERATE_GRADIENT_CLIPPING"] = "0.0"  # what `accelerate launch` makes of the yaml's 0.0

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin

accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
model = torch.nn.Linear(8, 8)
engine, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
print(json.dumps({"found": float(engine.gradient_clipping())}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
