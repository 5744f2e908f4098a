"""Claimed: "DeepSpeed doesn't validate parameter names and any typos fallback on the parameter's default setting"
(Transformers, docs/source/en/deepspeed.md of version 4, ZeRO configuration).

What happens (deepspeed 0.19.8): that is true at the top of a config. Inside zero_optimization a typo is refused.
"""

import json
import os

os.environ["DS_ACCELERATOR"] = "cpu"

from deepspeed.runtime.config import DeepSpeedConfig


def taken(**config) -> str:
    try:
        DeepSpeedConfig({"train_batch_size": 1} | config)
    except Exception as error:
        return type(error).__name__
    return "accepted"


inside = taken(zero_optimization={"stage": 2, "reduce_bucket_sise": 1000})
print(json.dumps({"found": inside, "top": taken(gradient_cliping=0.5)}))
