# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate==1.15.0", "deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: saving is unchanged under stages 1 and 2 (Accelerate's DeepSpeed guide, Saving and loading).

What happens (accelerate 1.15.0): `Accelerator.get_state_dict` under stages 1 and 2 copies tensor by tensor, so tied
weights are in it twice and no longer tied. Without DeepSpeed, and under stage 3, they are in it once.
"""

import json
import logging
import os

logging.disable(logging.WARNING)
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight


accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
model = Tied()
plain = len({tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()})
engine, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
saved = len({tensor.untyped_storage().data_ptr() for tensor in accelerator.get_state_dict(engine).values()})
print(json.dumps({"found": saved / plain}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
