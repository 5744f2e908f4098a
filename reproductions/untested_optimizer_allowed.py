# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate==1.15.0", "deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: DeepSpeed refuses an optimizer that was not tested with ZeRO, unless `zero_allow_untested_optimizer` says
otherwise (DeepSpeed's message when it refuses; Transformers' guide, which has the user add it).

What happens (accelerate 1.15.0): Accelerate silently sets it to true for every optimizer created in code, even if the
user's DeepSpeed config has false.
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

config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": False,
}
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
model = torch.nn.Linear(8, 8)
try:
    engine, _ = accelerator.prepare(model, torch.optim.RMSprop(model.parameters()))
    found = "accepted"
except AssertionError:
    found = "rejected"
print(json.dumps({"found": found}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
