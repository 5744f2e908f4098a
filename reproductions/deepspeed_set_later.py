# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate==1.15.0", "deepspeed==0.19.8", "torch==2.13.0", "transformers==5.23.0"]
# ///
"""Claimed: the field `deepspeed` of `TrainingArguments` turns DeepSpeed on (Transformers, its docstring).

What happens (transformers 5.23.0): only if it is given when the object is created. A value that is set afterwards is
stored and shown, but never read: the Trainer silently trains without DeepSpeed.
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
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(folder, max_steps=1, report_to="none", save_strategy="no", use_cpu=True)
    arguments.deepspeed = {"train_batch_size": 1, "zero_optimization": {"stage": 2}}
    trainer = Trainer(BertForSequenceClassification(shape), arguments, train_dataset=[row] * 8)
    trainer.train()
seen = {"wrapper": type(trainer.model_wrapped).__name__}
print(json.dumps({"found": bool(trainer.is_deepspeed_enabled), **seen}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
