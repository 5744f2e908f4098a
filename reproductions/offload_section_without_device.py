# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: an offload_param or offload_optimizer section that names no device offloads to the CPU (DeepSpeed,
docs/_pages/config-json.md, the tables of both sections).

What happens (deepspeed 0.19.8): the device is none, so nothing is offloaded, and nothing says so.
"""

import json
import os

os.environ["DS_ACCELERATOR"] = "cpu"

from deepspeed.runtime.config import DeepSpeedConfig

sections = {name: {"pin_memory": False} for name in ("offload_param", "offload_optimizer")}
zero = DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": {"stage": 3} | sections}).zero_config
print(json.dumps({"found": str(zero.offload_param.device), "optimizer": str(zero.offload_optimizer.device)}))
