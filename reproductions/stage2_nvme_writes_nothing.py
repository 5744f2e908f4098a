# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: the optimizer's states can be offloaded to NVMe under stages 1, 2 and 3
(DeepSpeed, docstring of `DeepSpeedZeroConfig.offload_optimizer`; Accelerate's DeepSpeed guide: stage 2 and above).

What happens (deepspeed 0.19.8): stage 2 accepts `device: nvme` silently, treats it as `cpu`, and writes no file.
DeepSpeed's configuration page says stage 3 only, and that what is not supported raises an assertion; none does.
"""

import json
import logging
import os
import tempfile
from pathlib import Path

logging.disable(logging.WARNING)
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import AsyncIOBuilder


def written(stage: int) -> bool:
    """Train two steps, and return whether anything was written to the path."""
    with tempfile.TemporaryDirectory() as folder:
        model = torch.nn.Linear(1024, 2048)  # 8 MiB a tensor: above the 1 MiB from which stage 3 swaps
        offload = {"device": "nvme", "nvme_path": folder, "pin_memory": False}
        config = {"train_batch_size": 1, "zero_optimization": {"stage": stage, "offload_optimizer": offload}}
        engine, *_ = deepspeed.initialize(model=model, optimizer=DeepSpeedCPUAdam(model.parameters()), config=config)
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 1024)).sum())
            engine.step()
        return any(path.is_file() for path in Path(folder).rglob("*"))


# The same settings under stage 3 do write, where DeepSpeed's operator for disks can be used: it needs libaio.
seen = {"found": written(stage=2), "accepted": True, "stage_3_writes": None}
if AsyncIOBuilder().is_compatible(verbose=False):
    seen["stage_3_writes"] = written(stage=3)
print(json.dumps(seen), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
