# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: aio.thread_count is the parallelism within each read or write (DeepSpeed, docs/_pages/config-json.md,
Asynchronous I/O).

What happens (deepspeed 0.19.8): the parser reads intra_op_parallelism. thread_count is accepted and ignored.
"""

import json
import os

os.environ["DS_ACCELERATOR"] = "cpu"

from deepspeed.runtime.config import DeepSpeedConfig

config = DeepSpeedConfig({"train_batch_size": 1, "aio": {"thread_count": 4}})
print(json.dumps({"found": config.aio_config["intra_op_parallelism"]}))
