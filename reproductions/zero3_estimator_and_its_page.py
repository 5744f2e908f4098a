"""Claimed: for 2851 million parameters, 32 million of them in the largest layer, on 8 GPUs,
`estimate_zero3_model_states_mem_needs_all_cold` prints 6.09 GB a GPU without offloading
(DeepSpeed's page Memory Requirements).

What happens (deepspeed 0.19.8): it does.
"""

import json
import os

os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

_, gpu, _ = estimate_zero3_model_states_mem_needs(2_851_000_000, 32_000_000, 8, 1, cpu_offload=False)
print(json.dumps({"found": round(gpu / 2**30, 2)}))
