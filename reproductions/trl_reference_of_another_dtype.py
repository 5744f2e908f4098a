# /// script
# requires-python = ">=3.11"
# dependencies = ["trl==1.16.0", "torch==2.13.0", "transformers==5.23.0", "tokenizers", "datasets"]
# ///
"""Claimed: without a ref_model, DPO compares with the initial policy (DPOTrainer's documentation of `ref_model`).

What happens (TRL 1.15.0, not in 1.16.0): the reference of a model that is given as such is read anew, in the
checkpoint's dtype. A policy in fp32 is compared with itself in bf16, so the loss of the first step is not log 2.
"found": the dtypes of policy and reference.
"""

import json
import logging
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

logging.disable(logging.WARNING)
words = {word: number for number, word in enumerate(["<pad>", "<eos>", "a", "b", "c"])}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="a")))
tokenizer.pad_token, tokenizer.eos_token = "<pad>", "<eos>"
sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 8}
rows = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2)
with tempfile.TemporaryDirectory() as folder:
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).to(torch.bfloat16).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)  # of its own dtype: transformers 5 takes the file's
    args = DPOConfig(output_dir=folder, use_cpu=True, bf16=False, report_to=[])
    trainer = DPOTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
print(json.dumps({"found": f"{trainer.model.dtype} {trainer.ref_model.dtype}"}))
