# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0", "transformers==5.23.0"]
# ///
"""Claimed: with DeepSpeed's Muon, embeddings fall back to AdamW (DeepSpeed, blogs/muon-optimizer/README.md).

What happens (deepspeed 0.19.8, transformers 5.23.0): DeepSpeed recognises embeddings by `embed` or `lm_head` in their
name. GPT-2's are called `wte` and `wpe`, so Muon treats them as matrices of a layer.
"""

import json
import logging
import os
import types

logging.disable(logging.WARNING)
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

from deepspeed import set_optimizer_flags
from transformers import GPT2Config, GPT2LMHeadModel

model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=99, n_positions=16))
set_optimizer_flags(types.SimpleNamespace(optimizer_name="muon", optimizer_params={}), model)
print(json.dumps({"found": model.transformer.wte.weight.use_muon}))
