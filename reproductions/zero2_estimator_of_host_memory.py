# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: with the optimizer offloaded, stage 2 needs 1.5 x max(4 x GPUs of a node, 16) bytes a parameter of a node's
memory (DeepSpeed's page Memory Requirements, General RAM).

What happens (deepspeed 0.19.8): `estimate_zero2_model_states_mem_needs` takes the GPUs of all nodes. For two nodes
of 8 GPUs it says 96 bytes a parameter and node, where the page's formula is 48.
"""

import json
import os

os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

parameters = 1_000_000
host, _ = estimate_zero2_model_states_mem_needs(parameters, num_gpus_per_node=8, num_nodes=2, cpu_offload=True)
print(json.dumps({"found": host / parameters}))
