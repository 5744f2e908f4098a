# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate==1.15.0", "deepspeed==0.19.8", "torch==2.13.0", "transformers==5.23.0"]
# ///
"""Claimed: `reduce_bucket_size: auto` becomes the square of the model's hidden size
(Accelerate's DeepSpeed guide, how the auto values are calculated).

What happens (accelerate 1.15.0): it does.
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
from transformers import BertConfig, BertModel

config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
shape = BertConfig(hidden_size=48, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=99)
model = BertModel(shape)
engine, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
print(json.dumps({"found": engine.zero_reduce_bucket_size()}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
