"""Claimed: with `elastic_checkpoint: true` a checkpoint of stage 3 from N ranks loads on any number of ranks
(DeepSpeed's ZeRO tutorial, section ZeRO-3 Elastic Checkpoints).

What happens (deepspeed 0.19.8): saved by two ranks and loaded by one, it raises. The option's own docstring says that
it is no longer supported, and names Universal Checkpointing instead.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile

if "RANK" not in os.environ:  # starts itself: two ranks save, one loads
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (2, 1):
            start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
            subprocess.run([*start, __file__, folder], check=True)
    sys.exit()
logging.disable(logging.WARNING)
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import deepspeed
import torch

model = torch.nn.Linear(8, 8)
zero = {"stage": 3, "elastic_checkpoint": True, "reduce_bucket_size": 1 << 16}
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
if deepspeed.comm.get_world_size() == 2:
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
    engine.save_checkpoint(sys.argv[1], tag="here")
else:
    try:
        found, error = engine.load_checkpoint(sys.argv[1], tag="here")[0] is not None, ""
    except Exception as raised:
        found, error = False, str(raised).splitlines()[0]
    print(json.dumps({"found": found, "error": error[:200]}), flush=True)
deepspeed.comm.barrier()
os._exit(0)  # gloo's threads may abort an ordinary exit
