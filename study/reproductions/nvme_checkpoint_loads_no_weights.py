"""Claimed: `load_checkpoint` loads a training checkpoint, and by default the training optimizer states as well
(its docstring in DeepSpeed).

What happens (deepspeed 0.19.8): with optimizer states on the disk its files are copied back, and nothing else that the
ranks wrote is read. Training goes on with the weights that the new process began with, and says nothing.
"""

import json, logging, os, tempfile  # noqa: E401

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


def train(engine, steps) -> list[float]:
    losses = []
    for step in steps:
        losses.append(engine(ROWS[step]).square().mean())
        engine.backward(losses[-1])
        engine.step()
    return [loss.item() for loss in losses]


found = {}
for device in ("cpu", "nvme"):
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_on(device, f"{folder}/first")
        train(engine, range(4))
        engine.save_checkpoint(f"{folder}/checkpoint")
        whole = train(engine, range(4, 8))
        engine = engine_on(device, f"{folder}/second")
        engine.load_checkpoint(f"{folder}/checkpoint")
        found[device] = {"whole": whole, "resumed": train(engine, range(4, 8))}
        found[device]["of new weights"] = train(engine_on(device, f"{folder}/third"), [4])
print(json.dumps({"found": found["nvme"]["whole"] == found["nvme"]["resumed"]} | found), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
