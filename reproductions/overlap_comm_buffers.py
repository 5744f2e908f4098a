# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: `overlap_comm` takes 4.5 times `allgather_bucket_size` and `reduce_bucket_size`: 9 GB in 16 bits where both
are 5e8 elements (Transformers' DeepSpeed guide up to version 5.0, ZeRO configuration, ZeRO-2).

What happens (deepspeed 0.19.8): stage 2 keeps two buffers of `reduce_bucket_size` instead of one, 2 GB in that
example, and gathers the weights in place.
"""

import gc
import json
import logging
import os

logging.disable(logging.WARNING)
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import deepspeed
import torch

BUCKET = 1 << 20
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
zero = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
config = {"train_batch_size": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
seen = []


def look(*_) -> None:
    """Every tensor of a bucket's size that is alive now, in the middle of a backward pass or of an update."""
    storages = [t.untyped_storage() for t in gc.get_objects() if type(t) is torch.Tensor and t.device.type != "meta"]
    sizes = {storage._cdata: storage.nbytes() for storage in storages}.values()
    seen.append(sum(size for size in sizes if size >= 2 * BUCKET))


engine.module[0].weight.register_hook(look)  # the last gradient of the backward pass
engine.basic_optimizer.register_step_post_hook(look)
for _ in range(2):
    engine.backward(engine(torch.ones(1, 256, dtype=torch.bfloat16)).sum())
    engine.step()
example = max(seen) / BUCKET * 5e8 / 1e9
print(json.dumps({"found": example, "bytes": max(seen)}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
