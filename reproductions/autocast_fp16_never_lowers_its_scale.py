# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: with `torch_autocast` in float16, DeepSpeed scales the loss by a torch.amp.GradScaler, as PyTorch does, and
that lowers the scale when gradients overflow (`torch_autocast_gradscaler` in the optimizers of stages 1 to 3).

What happens (deepspeed 0.19.8): DeepSpeed detects the overflow from the norm of the gradients, and skips the step
before it calls the GradScaler. The scale stays at 65536. If that is too high for a model, no step is ever taken,
without a message.
"""

import json
import logging
import os

logging.disable(logging.WARNING)
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import deepspeed
import torch

deepspeed.init_distributed("gloo")
found, row = {}, torch.ones(1, 8)  # a gradient of 100 overflows in fp16 until the scale is down to 512
for name in ("stage 1", "stage 2", "torch"):
    model, scaler = torch.nn.Linear(8, 8), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    if name != "torch":
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": int(name[-1])},
                  "torch_autocast": {"enabled": True, "dtype": "float16"}}  # fmt: skip
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    found[name] = 0
    for _ in range(20):
        before = model.weight.detach().clone()
        if name == "torch":
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = 100 * model(row).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            engine.backward(100 * engine(row).sum())
            engine.step()
        found[name] += not torch.equal(before, model.weight)
print(json.dumps({"found": found["stage 2"]} | found), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
