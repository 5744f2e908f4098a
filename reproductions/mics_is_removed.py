# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: "Use MiCS to partition the model states (including optimizer states, gradients, and parameters). The
following config example partitions the model states to eight devices" (DeepSpeed, docs/code-docs/source/zero3.rst).

What happens (deepspeed 0.19.8 with torch 2.13.0): its config is refused, "MiCS ZeRO-3 sharding has been removed". What
is left of sharding within a node is hpZ (zero_hpz_partition_size): a second copy of the weights; states stay spread
over all ranks.
"""

import json
import os

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="16", MASTER_ADDR="localhost", MASTER_PORT="0")

import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)  # the other ranks are not needed


def taken(**zero) -> str:
    try:
        DeepSpeedConfig({"train_batch_size": 16, "zero_optimization": {"stage": 3} | zero})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


answer = taken(mics_shard_size=8, mics_hierarchical_params_gather=False)
print(json.dumps({"found": answer.partition(":")[0], "message": answer, "hpZ": taken(zero_hpz_partition_size=8)}))
