# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate==1.15.0", "deepspeed==0.19.8", "torch==2.13.0", "transformers==5.23.0"]
# ///
"""Claimed: `zero3_init_flag` controls how ZeRO stage 3 initializes parameters, in full or in 16 bits, and saves memory
while they are created (`DeepSpeedPlugin.zero3_init_flag`, in a guide to it).

What happens (accelerate 1.15.0, transformers 5.23.0, deepspeed 0.19.8): the precision of new parameters is that of the
training, and with the flag on or off `from_config` creates them in parts.
"""

import json
import logging
import os
import subprocess
import sys

logging.disable(logging.WARNING)
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

if len(sys.argv) == 1:  # each case in its own process, because the plugin registers its config for good
    cases = [(flag, precision) for flag in ("on", "off") for precision in ("no", "bf16")]
    created = {}
    for flag, precision in cases:
        ended = subprocess.run([sys.executable, __file__, flag, precision], capture_output=True, text=True, check=True)
        created[f"flag {flag}, precision {precision}"] = json.loads(ended.stdout.splitlines()[-1])
    controls = any(
        created[f"flag on, precision {name}"] != created[f"flag off, precision {name}"] for name in ("no", "bf16")
    )
    print(json.dumps({"found": controls, "created": created}), flush=True)
    os._exit(0)

from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from transformers import AutoModel, BertConfig

flag, precision = sys.argv[1:]
plugin = DeepSpeedPlugin(zero_stage=3, zero3_init_flag=flag == "on")
accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision=precision)
shape = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=99)
first = next(AutoModel.from_config(shape).parameters())
print(json.dumps([str(first.dtype), "in parts" if hasattr(first, "ds_tensor") else "whole"]), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
