"""Claimed: with `torch_autocast` in float16, DeepSpeed scales the loss by a torch.amp.GradScaler, as PyTorch does, and
that lowers the scale when gradients overflow (`torch_autocast_gradscaler` in the optimizers of stages 1 to 3).

What happens (deepspeed 0.19.8): stages 1 to 3 see the overflow by the gradients' norm and skip the step before their
GradScaler is asked. The scale stays at 65536; where that is too high for a model, no step is ever taken, and nothing is
said. PyTorch's own loop halves it until it fits, and goes on.
"""

import json
import logging
import os

logging.disable(logging.WARNING)
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import deepspeed
import torch

STEPS, ROW = 20, torch.ones(1, 8)


def updates(step, weight) -> int:
    """How many of the steps change the weights. A gradient of 100 is above what fp16 holds until the scale is 512."""
    taken = 0
    for _ in range(STEPS):
        before = weight.detach().clone()
        step()
        taken += not torch.equal(before, weight)
    return taken


def with_deepspeed(stage: int) -> int:
    model = torch.nn.Linear(8, 8)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage},
              "torch_autocast": {"enabled": True, "dtype": "float16"}}  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    return updates(lambda: (engine.backward(100 * engine(ROW).sum()), engine.step()), model.weight)


def with_torch() -> int:
    model, scaler = torch.nn.Linear(8, 8), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = 100 * model(ROW).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return updates(step, model.weight)


deepspeed.init_distributed("gloo")
print(json.dumps({"found": with_deepspeed(2), "stage 1": with_deepspeed(1), "torch": with_torch()}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
