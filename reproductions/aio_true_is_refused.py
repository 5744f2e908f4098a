# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: `"aio": true` in the config makes NVMe reads faster (an article on DeepSpeed).

What happens (deepspeed 0.19.8): the config is refused with an AttributeError. `aio` is a table of sizes and queues.
"""

import json
import logging
import os

logging.disable(logging.WARNING)
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

from deepspeed.runtime.config import DeepSpeedConfig


def read(aio: object) -> str:
    """ "accepted", or the error."""
    try:
        DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "aio": aio})
    except AttributeError as error:
        return type(error).__name__
    return "accepted"


print(json.dumps({"found": read(True), "a table": read({"block_size": 1 << 20})}), flush=True)
