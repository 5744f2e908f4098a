# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate==1.15.0", "deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: an optimizer made in code is the one that trains; no code has to change
(Accelerate's DeepSpeed guide, Custom Optim + Custom Scheduler).

What happens (accelerate 1.15.0): when the optimizer is offloaded, `torch.optim.SGD` is replaced by `DeepSpeedCPUAdam`,
without a message. So is every other optimizer that is not Adagrad or a 32-bit Lion.
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
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
}
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
model = torch.nn.Linear(8, 8)
engine, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
print(json.dumps({"found": type(engine.basic_optimizer).__name__}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
