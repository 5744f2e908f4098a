"""The Hugging Face Trainer on sentence pairs, as in GLUE. What was added: an import, and the callback.

accelerate launch --config_file accelerate_configs/zero3.yaml examples/trainer_glue.py --run_dir runs/mine
"""

import argparse
import os
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from study.watch import WatchCallback


class SyntheticPairs(Dataset):
    """Two sentences in each row; the label says whether they begin with the same word."""

    def __init__(self, rows: int, tokens: int = 16):
        generator = torch.Generator().manual_seed(0)
        self.pairs = torch.randint(5, 1000, (rows, 2, tokens), generator=generator)
        self.labels = torch.randint(0, 2, (rows,), generator=generator)
        self.pairs[self.labels == 1, 1, 0] = self.pairs[self.labels == 1, 0, 0]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        types = torch.arange(2).repeat_interleave(self.pairs.shape[2])
        return {"input_ids": self.pairs[i].flatten(), "token_type_ids": types, "labels": self.labels[i]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--run_dir", default="runs/trainer_glue")
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()

    set_seed(42)
    on_cpus = "LOCAL_RANK" in os.environ and not torch.cuda.is_available()
    training = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        max_steps=args.steps,
        per_device_train_batch_size=4,
        max_grad_norm=0.0,  # no clipping, as in the DeepSpeed configs of the arms
        save_strategy="no",
        report_to="none",
        ddp_backend="gloo" if on_cpus else None,
        use_cpu=on_cpus and os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true",  # otherwise each rank trains alone
    )
    config = BertConfig(
        vocab_size=1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256
    )
    model = BertForSequenceClassification(config)
    trainer = Trainer(model, training, train_dataset=SyntheticPairs(256), callbacks=[WatchCallback(args.run_dir)])
    trainer.train()


if __name__ == "__main__":
    main()
