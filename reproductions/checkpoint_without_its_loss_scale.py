# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate==1.15.0", "deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: `save_state` saves the current states of the model, optimizer, scaler, RNG generators and registered objects
(its docstring in Accelerate, and of `load_state` likewise).

What happens (accelerate 1.15.0, deepspeed 0.19.8): under DeepSpeed in float16 with `torch_autocast` the scaler is in
ZeRO's optimizer (`torch_autocast_gradscaler`) and is not saved. A resumed training starts with the initial scale.
"""

import json
import logging
import os
import tempfile

logging.disable(logging.WARNING)
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import torch
from accelerate import Accelerator, DeepSpeedPlugin

CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 1,
          "torch_autocast": {"enabled": True, "dtype": "float16"}}  # fmt: skip
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIG))


def prepared():
    model = torch.nn.Linear(8, 8)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def forget(engine) -> None:
    """What Accelerate has of an earlier training, so that the next one stands for a new process."""
    accelerator._models.clear(), accelerator._optimizers.clear()


scales = {}
engine, optimizer = prepared()
scaler = optimizer.optimizer.torch_autocast_gradscaler
scaler.load_state_dict(scaler.state_dict() | {"scale": 512.0, "_growth_tracker": 7})
accelerator.backward(engine(torch.ones(1, 8)).sum())
scales["saved"] = [scaler.get_scale(), scaler.state_dict()["_growth_tracker"]]
with tempfile.TemporaryDirectory() as folder:
    accelerator.save_state(folder)
    forget(engine)
    engine, optimizer = prepared()
    accelerator.load_state(folder)
scaler = optimizer.optimizer.torch_autocast_gradscaler
scales["loaded"] = [scaler.get_scale(), scaler.state_dict()["_growth_tracker"]]
print(json.dumps({"found": scales["loaded"] == scales["saved"]} | scales), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
