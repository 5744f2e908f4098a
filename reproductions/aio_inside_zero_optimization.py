"""Claimed: the aio section belongs inside zero_optimization (Transformers, docs/source/en/deepspeed.md of version 4,
the example of its NVMe configuration).

What happens (deepspeed 0.19.8): such a config is refused. aio is a section at the top.
"""

import json
import os

os.environ["DS_ACCELERATOR"] = "cpu"

from deepspeed.runtime.config import DeepSpeedConfig

AIO = {"block_size": 262144, "queue_depth": 32, "intra_op_parallelism": 1}


def taken(**config) -> str:
    try:
        DeepSpeedConfig({"train_batch_size": 1} | config)
    except Exception as error:
        return type(error).__name__
    return "accepted"


inside = taken(zero_optimization={"stage": 3, "aio": AIO})
print(json.dumps({"found": inside, "at the top": taken(zero_optimization={"stage": 3}, aio=AIO)}))
