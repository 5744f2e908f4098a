# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate==1.15.0", "deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: `mixed_precision: bf16` is one setting of Accelerate, and outputs of the forward pass come back in fp32
(`Accelerator(mixed_precision=...)`; `convert_outputs_to_fp32` in what `prepare` wraps a model with).

What happens (accelerate 1.15.0): without DeepSpeed it is autocast over fp32 weights, and outputs are fp32. With
DeepSpeed the weights themselves are cast, and the loss of a training script has three significant digits.
"""

import json
import logging
import os

logging.disable(logging.WARNING)
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin


def output_and_weight(plugin) -> list[str]:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision="bf16", cpu=plugin is None, deepspeed_plugin=plugin)
    if plugin:
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
    model = torch.nn.Linear(8, 8)
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    row = torch.ones(1, 8, dtype=next(model.parameters()).dtype)
    return [str(tensor.dtype).removeprefix("torch.") for tensor in (model(row), next(model.parameters()))]


seen = {"single": output_and_weight(None), "stage 2": output_and_weight(DeepSpeedPlugin(zero_stage=2))}
print(json.dumps({"found": seen["stage 2"][0], "output_and_weight": seen}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
