# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: without offloading, `estimate_zero2_model_states_mem_needs` gives what parameters, gradients and optimizer
states take on a GPU (DeepSpeed's page Memory Requirements; the function's text).

What happens (deepspeed 0.19.8): with bf16 and AdamW on two ranks it says 11 bytes a parameter, and 10 are alive when
the optimizer updates: 16-bit gradients are gone by then. Buckets, activations and temporaries come on top, as it says.
"""

import gc
import json
import logging
import os
import sys

if "RANK" not in os.environ:  # starts itself on two ranks
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    os.execv(sys.executable, [*torchrun, __file__])
logging.disable(logging.WARNING)
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import deepspeed
import torch
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
parameters = sum(parameter.numel() for parameter in model.parameters())
zero = {"stage": 2, "reduce_bucket_size": 1 << 10}
config = {"train_batch_size": 2, "bf16": {"enabled": True}, "zero_optimization": zero}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
seen = []


def look(*_) -> None:
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    storages = [t.untyped_storage() for t in tensors if t.device.type != "meta"]
    seen.append(sum({storage._cdata: storage.nbytes() for storage in storages}.values()) / parameters)


engine.basic_optimizer.register_step_pre_hook(look)
for _ in range(2):  # the first has no moments yet
    engine.backward(engine(torch.ones(1, 512, dtype=torch.bfloat16)).sum())
    engine.step()
_, predicted = estimate_zero2_model_states_mem_needs(parameters, num_gpus_per_node=2, cpu_offload=False)
if deepspeed.comm.get_rank() == 0:
    print(json.dumps({"found": seen[-1], "estimator": predicted / parameters}), flush=True)
deepspeed.comm.barrier()
os._exit(0)  # gloo's threads may abort an ordinary exit
