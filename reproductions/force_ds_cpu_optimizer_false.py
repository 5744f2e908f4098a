# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate==1.15.0", "deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: with an offloaded optimizer, `zero_force_ds_cpu_optimizer: false` is how to use DeepSpeed's CPU Adam
(Transformers' guide DeepSpeed ZeRO, the paragraph on optimizer and scheduler).

What happens (accelerate 1.15.0, deepspeed 0.19.8): the opposite is true. With true, the default, torch's AdamW is
replaced by `DeepSpeedCPUAdam`; with false it stays, and runs on the CPU.
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


def optimizer_class(force: bool) -> str:
    AcceleratorState._reset_state(reset_partial_state=True)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_force_ds_cpu_optimizer": force}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = torch.nn.Linear(8, 8)
    engine, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return type(engine.basic_optimizer).__name__


found, default = optimizer_class(False), optimizer_class(True)
print(json.dumps({"found": found, "with_true": default}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
