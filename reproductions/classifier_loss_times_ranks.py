# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.23.0", "accelerate==1.15.0"]
# ///
"""Claimed: the Trainer's gradient accumulation and its ranks make one batch of several (Trainer's pages;
`average_tokens_across_devices`: "the loss is averaged over all tokens of all devices").

What happens (transformers 5.0.0, 5.23.0 and 5.24.0, not in 4.57.6): the forward of BertForSequenceClassification takes
**kwargs, so the Trainer takes it for a model that divides by `num_items_in_batch`. It does not divide by the passes,
and multiplies by the ranks. The model returns a mean. "found": the update of SGD on two ranks with two passes each,
of what one batch of the same rows gives. "remedied": the same with `model.accepts_loss_kwargs = False`.
"""

import json
import os
import sys
import tempfile

if "RANK" not in os.environ:  # starts itself on two ranks
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    os.execv(sys.executable, [*torchrun, __file__])
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

ROWS = [{"input_ids": [row, 1, 2, 3], "labels": row % 2} for row in range(8)]
ALL = {"input_ids": torch.tensor([row["input_ids"] for row in ROWS]), "labels": torch.arange(8) % 2}


def model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=16, **sizes, **dropout))


def update(remedied: bool) -> float:
    trained, before = model(), torch.nn.utils.parameters_to_vector(model().parameters())
    if remedied:
        trained.accepts_loss_kwargs = False
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=1,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            optim="sgd",
            learning_rate=1.0,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        Trainer(trained, arguments, train_dataset=ROWS).train()
    return float((torch.nn.utils.parameters_to_vector(trained.parameters()) - before).norm())


whole = model()
whole(**ALL).loss.backward()
expected = float(torch.cat([each.grad.flatten() for each in whole.parameters() if each.grad is not None]).norm())
found = {"found": round(update(False) / expected, 3), "remedied": round(update(True) / expected, 3)}
print(json.dumps(found) if os.environ["RANK"] == "0" else "", flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
