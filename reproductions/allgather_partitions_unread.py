# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: `allgather_partitions` chooses how stages 1 and 2 gather the updated weights: true by all-gather, false by
broadcasts (DeepSpeed's configuration page and docstring of `DeepSpeedZeroConfig.allgather_partitions`).

What happens (deepspeed 0.19.8): the optimizer never reads it. With false a step all-gathers and broadcasts nothing.
"""

import json
import logging
import os
import sys

if "RANK" not in os.environ:  # starts itself on two ranks
    os.execv(
        sys.executable, [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__]
    )
logging.disable(logging.WARNING)
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import deepspeed
import torch

model = torch.nn.Linear(64, 64)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "zero_optimization": {"stage": 1, "allgather_partitions": False, "reduce_bucket_size": 1 << 16},
    "comms_logger": {"enabled": True, "prof_all": True, "verbose": False},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
engine.backward(engine(torch.ones(1, 64)).sum())
deepspeed.comm.comm.comms_logger.comms_dict.clear()  # only what the update sends is asked here
engine.step()
names = sorted(deepspeed.comm.comm.comms_logger.comms_dict)
if deepspeed.comm.get_rank() == 0:
    found = "broadcast" if any("broadcast" in name for name in names) else "all_gather"
    print(json.dumps({"found": found, "collectives": names}), flush=True)
deepspeed.comm.barrier()
os._exit(0)  # gloo's threads may abort an ordinary exit
