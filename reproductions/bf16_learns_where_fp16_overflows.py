# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: bfloat16 sometimes improves convergence (DeepSpeed's option `bf16`, in a guide to it).

What happens (deepspeed 0.19.8): against fp16 it can. Where gradients overflow at the first loss scales, PyTorch skips
steps until the scale is low enough, and DeepSpeed's autocast skips all. With bf16 every step is taken.
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


def last_loss(library: str, dtype: torch.dtype, seed: int) -> float:
    torch.manual_seed(seed)
    model, scaler = torch.nn.Linear(16, 1), torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    rows, wanted = torch.randn(64, 16), torch.randn(64, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if library == "deepspeed":
        config = {"train_batch_size": 64, "zero_optimization": {"stage": 2},
                  "torch_autocast": {"enabled": True, "dtype": str(dtype).removeprefix("torch.")}}  # fmt: skip
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(20):
        with torch.autocast("cpu", dtype, enabled=library == "torch"):
            loss = 100 * ((engine if library == "deepspeed" else model)(rows).float() - wanted).square().sum()
        if library == "deepspeed":
            engine.backward(loss)
            engine.step()
        else:
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return loss.item()


cases = [(library, seed) for library in ("deepspeed", "torch") for seed in (1, 2, 3)]
ends = {
    f"{name} {seed}": [last_loss(name, dtype, seed) for dtype in (torch.bfloat16, torch.float16)]
    for name, seed in cases
}
print(json.dumps({"found": all(bf16 < fp16 for bf16, fp16 in ends.values()), "last loss": ends}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
