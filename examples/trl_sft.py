"""Supervised fine-tuning with TRL. What was added: an import, and the callback.

accelerate launch --config_file accelerate_configs/zero2.yaml examples/trl_sft.py --run_dir runs/mine
"""

import argparse
import os
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from study.watch import WatchCallback

WORDS = ["the", "a", "cat", "dog", "bird", "sees", "likes", "hears", "red", "green", "small", "old", "and", "runs"]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    numbers = {word: number for number, word in enumerate([*special.values(), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--run_dir", default="runs/trl_sft")
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()

    set_seed(42)
    texts = [" ".join(WORDS[(i * step) % len(WORDS)] for i in range(1, 25)) for step in range(1, 129)]
    on_cpus = "LOCAL_RANK" in os.environ and not torch.cuda.is_available()
    training = SFTConfig(
        output_dir=tempfile.gettempdir(),
        max_steps=args.steps,
        per_device_train_batch_size=4,
        max_length=32,
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
        bf16=False,
        ddp_backend="gloo" if on_cpus else None,
        use_cpu=on_cpus and os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true",  # otherwise each rank trains alone
    )
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model, data = LlamaForCausalLM(config), Dataset.from_dict({"text": texts})
    callbacks = [WatchCallback(args.run_dir)]
    trainer = SFTTrainer(model, training, train_dataset=data, processing_class=tiny_tokenizer(), callbacks=callbacks)
    trainer.train()


if __name__ == "__main__":
    main()
