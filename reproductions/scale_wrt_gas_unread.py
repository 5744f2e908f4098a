# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.18.3", "torch==2.13.0"]
# ///
"""Claimed: `engine.backward(loss, scale_wrt_gas=False)` does not divide by gradient_accumulation_steps (its docstring).
The Trainer of transformers gives it since 4.49, because its loss is divided already (huggingface/transformers#35808).

What happens (deepspeed 0.18.3, not in 0.18.2 and 0.18.4; mended by deepspeedai/DeepSpeed#7724): the gradient is divided
again. "found": the update of four passes whose losses were divided by four, of what it should be, under stage 3.
"""

import json
import logging
import os

logging.disable(logging.WARNING)
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import deepspeed
import torch


def update(scale_wrt_gas: bool) -> float:
    """Of a loss whose gradient is 1 in each of four passes, so that it should be 1."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    zero = {"zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
    config = {"train_batch_size": 4, "gradient_accumulation_steps": 4, **zero}
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config)
    for _ in range(4):
        loss = engine(torch.ones(1, 1)).sum()
        engine.backward(loss if scale_wrt_gas else loss / 4, scale_wrt_gas=scale_wrt_gas)
        engine.step()
    with deepspeed.zero.GatheredParameters(engine.module.weight):
        return -engine.module.weight.item()


print(json.dumps({"found": update(False), "scale_wrt_gas": update(True)}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
