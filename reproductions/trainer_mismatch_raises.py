"""Claimed: a batch size or number of microbatches in the DeepSpeed config that disagrees with `TrainingArguments` is
used silently (Transformers' guide DeepSpeed ZeRO, the paragraph on batch sizes).

What happens (transformers 5.23.0): training does not start; a ValueError lists both values.
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
config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3, "zero_optimization": {"stage": 1}}
found = "accepted"
with tempfile.TemporaryDirectory() as folder:
    try:
        arguments = TrainingArguments(
            folder, deepspeed=config, per_device_train_batch_size=2, gradient_accumulation_steps=1, max_steps=1,
            report_to="none", save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        Trainer(BertForSequenceClassification(shape), arguments, train_dataset=[row] * 32).train()
    except ValueError as error:
        found = "rejected" if "mismatch" in str(error) else str(error)
print(json.dumps({"found": found}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
