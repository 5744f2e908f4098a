"""The trainer beside a loop in plain PyTorch, whose losses are those that transformers itself computes."""

import pytest
import torch
import transformers

from study.core.settings import Settings, TrainerFlags, resolve
from study.training import models
from study.training.data import Rows, load_data

STEPS = 12
SETTINGS: dict = {"steps": STEPS, "micro_batch": 4, "accumulation": 2, "sequence": 32, "train_rows": 48, "eval_rows": 8}


def arranged(settings: Settings, rows: Rows) -> Rows:
    """The rows of the whole training, epoch after epoch: steps, passes, rows of a pass."""
    orders = [
        torch.randperm(48, generator=torch.Generator().manual_seed(settings.seed * 1000 + epoch)) for epoch in range(2)
    ]
    order = torch.cat(orders).view(STEPS, settings.accumulation, settings.micro_batch)
    return {name: values[order] for name, values in rows.items()}


def plain_losses(settings: Settings) -> list[float]:
    data = load_data(settings)
    config = models.model_config(settings, data.vocabulary)
    kinds = {"imdb": transformers.AutoModelForSequenceClassification, "wikitext": transformers.AutoModelForCausalLM}
    model = kinds[settings.task].from_pretrained(models.drawn_weights(settings, config)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    rows = arranged(settings, data.train)
    rows.setdefault("labels", rows["input_ids"])  # of a decoder, which shifts them itself
    torch.manual_seed(settings.seed)  # so that the dropout masks are those of the trainer
    losses = []
    for step in range(STEPS):
        total = 0.0
        for i in range(settings.accumulation):
            loss = model(**{name: values[step, i] for name, values in rows.items()}).loss / settings.accumulation
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        losses.append(total)
    return losses


@pytest.mark.parametrize("task", ["imdb", "wikitext"])
def test_losses_equal_those_of_a_plain_loop(task, trained, cache):
    settings = resolve(TrainerFlags(task=task, cache_dir=cache, **SETTINGS), gpu=False)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    record = trained("single", "--task", task, *words, "--no-instruments").record
    plain = plain_losses(settings)
    assert max(plain) - min(plain) > 0.1, "a loss that never changes proves nothing"
    assert record.loss.train == pytest.approx(plain, abs=1e-5)
