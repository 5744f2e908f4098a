# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: with `zero_allow_untested_optimizer` false, which is the default, ZeRO refuses an optimizer that it was not
tested with (DeepSpeed's configuration page; the message of `DeepSpeedEngine`).

What happens (deepspeed 0.19.8): SGD is refused, with an explicit false and by default. AdamW is accepted.
"""

import json
import logging
import os

logging.disable(logging.WARNING)
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import deepspeed
import torch


def tried(kind: type, **allow) -> str:
    """ "accepted", or how DeepSpeed refuses stage 3 with this optimizer."""
    model = torch.nn.Linear(4, 4)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}} | allow
    try:
        deepspeed.initialize(model=model, optimizer=kind(model.parameters(), lr=0.1), config=config)
    except AssertionError:
        return "rejected"
    return "accepted"


seen = {
    "SGD, false": tried(torch.optim.SGD, zero_allow_untested_optimizer=False),
    "SGD, not said": tried(torch.optim.SGD),
    "AdamW, false": tried(torch.optim.AdamW, zero_allow_untested_optimizer=False),
}
print(json.dumps({"found": seen["SGD, false"], "tried": seen}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
