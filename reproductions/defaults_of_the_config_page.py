# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: overlap_comm is false, stage3_prefetch_bucket_size 5e8, the nvme_path of offloading /local_nvme, and
steps_per_print 10, if a config does not set them (DeepSpeed, docs/_pages/config-json.md).

What happens (deepspeed 0.19.8): none of the four is the default of DeepSpeed's own parser at stage 3.
"""

import json
import os

os.environ["DS_ACCELERATOR"] = "cpu"

from deepspeed.runtime.config import DeepSpeedConfig

offload = {"offload_param": {"device": "nvme"}}
config = DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": {"stage": 3} | offload})
zero = config.zero_config
found = {
    "overlap_comm": zero.overlap_comm,
    "stage3_prefetch_bucket_size": int(zero.prefetch_bucket_size),
    "nvme_path": str(zero.offload_param.nvme_path),
    "steps_per_print": config.steps_per_print,
}
documented = dict(zip(found, (False, 500_000_000, "/local_nvme", 10), strict=True))
print(json.dumps({"found": sum(found[name] == documented[name] for name in found)} | found))
