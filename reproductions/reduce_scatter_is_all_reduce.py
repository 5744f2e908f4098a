# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: `reduce_scatter: true`, the default, averages gradients by reduce or reduce-scatter instead of all-reduce
(DeepSpeed's configuration page and docstring of `DeepSpeedZeroConfig.reduce_scatter`).

What happens (deepspeed 0.19.8): stage 2 all-reduces every gradient and throws away what is not its own. It does so
because `use_multi_rank_bucket_allreduce`, true by default, takes precedence.
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
    "zero_optimization": {"stage": 2, "reduce_scatter": True, "reduce_bucket_size": 1 << 16},
    "comms_logger": {"enabled": True, "prof_all": True, "verbose": False},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
deepspeed.comm.comm.comms_logger.comms_dict.clear()  # what building the engine sent is not asked here
engine.backward(engine(torch.ones(1, 64)).sum())
weight = 4 * sum(parameter.numel() for parameter in model.parameters())
sent = {
    name: sum(size * len(calls[1]) for size, calls in sizes.items())
    for name, sizes in deepspeed.comm.comm.comms_logger.comms_dict.items()
}
if deepspeed.comm.get_rank() == 0:
    reduced = "all_reduce" if sent.get("all_reduce", 0) >= weight else "reduce or reduce-scatter"
    print(json.dumps({"found": reduced, "bytes": sent}), flush=True)
deepspeed.comm.barrier()
os._exit(0)  # gloo's threads may abort an ordinary exit
