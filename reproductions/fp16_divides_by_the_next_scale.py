# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: in fp16 the loss is multiplied by the loss scale, and gradients are divided by it before the update
(DeepSpeed's page of its configuration, "FP16 training options").

What happens (deepspeed 0.19.8): `step` first raises the scale, if no gradient has overflowed for `loss_scale_window`
updates, and then divides by the new scale. So each such update is half of what it should be. Without ZeRO, stage 0,
the loss is not multiplied at all, and all updates are divided by the scale.
"""

import json
import logging
import os

logging.disable(logging.WARNING)
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

get_accelerator().is_fp16_supported = lambda: True  # otherwise DeepSpeed refuses fp16 on most CPUs
UPDATES = 6


def updates(stage: int) -> list[float]:
    """By how much each update moves a weight whose gradient is 1. The scale may rise in every second update."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    config = {
        "train_batch_size": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    weights = [0.0]
    for _ in range(UPDATES):
        engine.backward(engine(torch.ones(1, 1, dtype=torch.float16)).sum())
        engine.step()
        with deepspeed.zero.GatheredParameters(model.weight, enabled=stage == 3):
            weights.append(-model.weight.item())
    return [round(after - before, 4) for before, after in zip(weights, weights[1:], strict=False)]


seen = {f"stage {stage}": updates(stage) for stage in (0, 1, 2, 3)}
halved = min(seen["stage 2"])
print(json.dumps({"found": halved, "right": 1.0} | seen), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
