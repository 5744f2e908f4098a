"""Advised: ZeRO-3 together with pipeline parallelism. DeepSpeed's own message says which stages a pipeline takes
(`deepspeed.runtime.pipe.engine.PipelineEngine`).

What happens (deepspeed 0.19.8): a pipeline trains with stage 1, and an assertion refuses stage 3.
"""

import json
import logging
import os

logging.disable(logging.WARNING)
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import deepspeed
import torch


def tried(stage: int) -> str:
    """ "accepted", or how DeepSpeed refuses a pipeline of one layer with this stage."""
    model = deepspeed.pipe.PipelineModule(layers=[torch.nn.Linear(4, 4)], loss_fn=torch.nn.MSELoss(), num_stages=1)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    try:
        deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    except AssertionError as error:
        return f"rejected: {error}"
    return "accepted"


deepspeed.init_distributed("gloo", verbose=False)
seen = {stage: tried(stage) for stage in (1, 3)}
print(json.dumps({"found": seen[3].partition(":")[0], "by_stage": seen}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
