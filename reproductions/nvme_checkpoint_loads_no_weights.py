# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: `load_checkpoint` loads a training checkpoint, and by default the training optimizer states as well
(its docstring in DeepSpeed).

What happens (deepspeed 0.19.8): with optimizer states on the disk, their files are copied back, and nothing else that
the ranks wrote is read. Training silently continues with the weights that the new process began with.
"""

import json
import logging
import os
import tempfile

logging.disable(logging.WARNING)
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import deepspeed
import torch

deepspeed.init_distributed("gloo")
ROWS = torch.randn(8, 4, 512, generator=torch.Generator().manual_seed(1))


def engine_on(device: str, disk: str):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(4)))
    home = {"device": device, "nvme_path": disk}
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3, "offload_optimizer": home}}
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def loss_of(engine, step: int) -> float:
    loss = engine(ROWS[step]).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


found = {}
for device in ("cpu", "nvme"):
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_on(device, f"{folder}/first")
        [loss_of(engine, step) for step in range(4)]
        engine.save_checkpoint(f"{folder}/checkpoint")
        found[device] = {"whole": loss_of(engine, 4)}
        (engine := engine_on(device, f"{folder}/second")).load_checkpoint(f"{folder}/checkpoint")
        found[device] |= {"resumed": loss_of(engine, 4), "new": loss_of(engine_on(device, f"{folder}/third"), 4)}
print(json.dumps({"found": found["nvme"]["whole"] == found["nvme"]["resumed"]} | found), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
