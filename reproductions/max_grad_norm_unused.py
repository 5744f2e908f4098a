# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate==1.15.0", "deepspeed==0.19.8", "torch==2.13.0", "transformers==5.23.0"]
# ///
"""Claimed: `max_grad_norm` of `TrainingArguments` is the norm that the Trainer clips at (Transformers, its docstring).

What happens (transformers 5.23.0, deepspeed 0.19.8): under DeepSpeed only if the config says `gradient_clipping: auto`.
If the config does not mention clipping, DeepSpeed clips at its own default, 1.0, whatever `max_grad_norm` is.
"""

import json
import logging
import os
import tempfile

logging.disable(logging.WARNING)
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

shape = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=99)
row = {"input_ids": torch.arange(8), "labels": torch.tensor(0)}
config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 1}}
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, deepspeed=config, max_grad_norm=0.25, max_steps=1, report_to="none", save_strategy="no"
    )
    trainer = Trainer(BertForSequenceClassification(shape), arguments, train_dataset=[row] * 8)
    trainer.train()
print(json.dumps({"found": float(trainer.model_wrapped.gradient_clipping())}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
