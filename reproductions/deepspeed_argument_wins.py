# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate==1.15.0", "deepspeed==0.19.8", "torch==2.13.0", "transformers==5.23.0"]
# ///
"""Claimed: started by `accelerate launch` with a DeepSpeed config, the `deepspeed` argument of `TrainingArguments` is
ignored (Transformers' guide DeepSpeed ZeRO, note beside the Accelerate config file).

What happens (transformers 5.23.0): the argument wins, and Accelerate's config is ignored.
"""

import json
import logging
import os
import tempfile

logging.disable(logging.WARNING)
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_ZERO_STAGE="3")  # as `accelerate launch` sets

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

shape = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=99)
row = {"input_ids": torch.arange(8), "labels": torch.tensor(0)}
config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 1}}
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, deepspeed=config, max_steps=1, report_to="none", save_strategy="no", disable_tqdm=True
    )
    trainer = Trainer(BertForSequenceClassification(shape), arguments, train_dataset=[row] * 8)
    trainer.train()
print(json.dumps({"found": trainer.model_wrapped.zero_optimization_stage()}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
