# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate==1.15.0", "deepspeed==0.19.8", "torch==2.13.0", "transformers==5.23.0"]
# ///
"""Claimed: `zero3_init_flag` decides whether a model is built in parts by `deepspeed.zero.Init`
(Accelerate's DeepSpeed guide, list of settings; `DeepSpeedPlugin.zero3_init_flag`).

What happens (accelerate 1.15.0, transformers 5.23.0): with the flag false, `from_config` still builds in parts.
Accelerate registers the config whatever the flag says, and Transformers checks only the stage.
"""

import json
import logging
import os

logging.disable(logging.WARNING)
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from transformers import AutoModel, BertConfig

accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False))
shape = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=99)
model = AutoModel.from_config(shape)
in_parts = any(hasattr(parameter, "ds_tensor") for parameter in model.parameters())
print(json.dumps({"found": in_parts}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
