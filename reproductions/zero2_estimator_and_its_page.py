"""Claimed: for 2851 million parameters on 8 GPUs, `estimate_zero2_model_states_mem_needs_all_cold` prints 15.93 GB a
GPU without offloading, being 4 bytes a parameter and 16 more shared by all GPUs (DeepSpeed's page Memory Requirements).

What happens (deepspeed 0.19.8): it prints 11.28 GB, being 2 bytes and 18 more shared. The page shows an older formula.
"""

import json
import os

os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

_, gpu = estimate_zero2_model_states_mem_needs(2_851_000_000, num_gpus_per_node=8, num_nodes=1, cpu_offload=False)
print(json.dumps({"found": round(gpu / 2**30, 2)}))
