# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: a model runs with 60 % of its parameters offloaded to the CPU (`offload_param`, in an article on it).

What happens (deepspeed 0.19.8): parameters below the threshold stay gathered, and
the others are offloaded: in a block of a decoder the shares are 100, 90, 66 and 0 %.
"""

import json
import logging
import os

logging.disable(logging.WARNING)
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import deepspeed
import torch

shares = {}
for threshold in (0, 64 * 64 + 1, 192 * 64 + 1, 256 * 64 + 1):
    model = torch.nn.TransformerEncoderLayer(64, 4, 256)  # weights of 3, 1, 4 and 4 times 64 x 64, as in GPT-3
    config = {
        "train_batch_size": 1,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": threshold,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
        },
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    sizes = {True: 0, False: 0}
    for parameter in engine.module.parameters():
        sizes[parameter.ds_persist] += parameter.ds_numel
    engine.backward(engine(torch.ones(2, 1, 64)).sum())
    engine.step()
    shares[threshold] = round(sizes[False] / sum(sizes.values()), 3)
nearest = min(shares.values(), key=lambda share: abs(share - 0.6))
print(json.dumps({"found": nearest, "offloaded share by threshold": shares}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
