# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: the communication logger logs every communication that DeepSpeed starts under `deepspeed.comm`
(DeepSpeed's tutorial Communication Logging, Overview).

What happens (deepspeed 0.19.8): under stages 1 to 3 it counts the same collectives in a step as PyTorch's own recorder.
"""

import json
import logging
import os
import pickle
import sys

if "RANK" not in os.environ:  # starts itself on two ranks
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    os.execv(sys.executable, [*torchrun, __file__])
logging.disable(logging.WARNING)
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import deepspeed
import torch
from torch._C._distributed_c10d import _dump_fr_trace


def recorded() -> int:
    return len(pickle.loads(_dump_fr_trace()).get("entries", []))


def calls(stage: int) -> tuple[int, int]:
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1 << 16, "stage3_param_persistence_threshold": 0},
        "comms_logger": {"enabled": True, "prof_all": True, "verbose": False},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    logger = deepspeed.comm.comm.comms_logger
    logger.comms_dict.clear()
    before = recorded()
    engine.backward(engine(torch.ones(1, 64)).sum())
    engine.step()
    return sum(len(one[1]) for sizes in logger.comms_dict.values() for one in sizes.values()), recorded() - before


seen = {stage: calls(stage) for stage in (1, 2, 3)}
if deepspeed.comm.get_rank() == 0:
    found = min(logged / there for logged, there in seen.values())
    print(json.dumps({"found": found, "logged_and_recorded_by_stage": seen}), flush=True)
deepspeed.comm.barrier()
os._exit(0)  # gloo's threads may abort an ordinary exit
