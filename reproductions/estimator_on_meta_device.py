# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: given a model, `estimate_zero2_model_states_mem_needs_all_live` finds the number of parameters by itself
(DeepSpeed's page Memory Requirements, and the function's docstring).

What happens (deepspeed 0.19.8): for a model on the meta device, which is how one builds a model too large for the
machine, it finds the parameters of one tensor. It tells tensors apart by their address, and all of them have address 0.
"""

import json
import os

os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import torch
from deepspeed.runtime.zero.stage_1_and_2 import model_to_params

with torch.device("meta"):
    model = torch.nn.Sequential(*[torch.nn.Linear(1000, 1000, bias=False) for _ in range(8)])
found = model_to_params(model) / sum(parameter.numel() for parameter in model.parameters())
print(json.dumps({"found": found}))
