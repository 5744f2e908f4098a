# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate==1.15.0", "deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: `Accelerator.clip_grad_norm_(parameters, max_norm)` stands in for torch's function and returns the norm
(its docstring).

What happens (accelerate 1.15.0): under DeepSpeed `max_norm` is not used: the gradients are clipped at the config's
value, 1.0 if it has none. Under stage 0 in fp32 the call returns None.
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


def update(stage: int | None) -> tuple[float, object]:
    """How far one step of SGD at rate 1 moves a weight whose gradient is 100: the norm that it was clipped at."""
    AcceleratorState._reset_state(reset_partial_state=True)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    plugin = None if stage is None else DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(deepspeed_plugin=plugin, cpu=plugin is None)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.full((1, 1), 100.0)).sum())
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    return round(-next(model.parameters()).item(), 4), norm if norm is None else float(norm)


seen = {"single": update(None), "stage 0": update(0), "stage 2": update(2)}
print(json.dumps({"found": seen["stage 2"][0], "clipped_at_and_returned": seen}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
