"""Small trainings on two ranks, each broken in one way or healthy: broken.py FOLDER KIND-NAME ..."""

import contextlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from study.watch import WatchCallback, watch

STEPS = 24
PASSES = 4
WIDTH = 32


class Data(TensorDataset):
    """Rows whose target is a function of them, so that there is something to learn."""

    def __init__(self, rows: int):
        made = torch.Generator().manual_seed(1)
        inputs = torch.randn(rows, WIDTH, generator=made)
        super().__init__(inputs, inputs @ torch.randn(WIDTH, 1, generator=made) / WIDTH**0.5)


class Detach(torch.nn.Module):
    def forward(self, inputs):
        return inputs.detach()


def model_of(name: str) -> torch.nn.Sequential:
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(64) if name == "healthy_norm" else torch.nn.Identity()
    layers = [torch.nn.Linear(WIDTH, 64), norm, torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 64)]
    last = Detach() if name == "detached" else torch.nn.ReLU()
    return torch.nn.Sequential(*layers, last, torch.nn.Linear(64, 1))


def with_accelerate(folder: Path, name: str) -> None:
    """The loop of Accelerate's page, with one line of it wrong."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PASSES)
    model = model_of(name)
    if name == "frozen":
        for layer in list(model)[:-1]:
            layer.requires_grad_(False)
        model[0] = torch.nn.Linear(WIDTH, 2048).requires_grad_(False)
        model[4] = torch.nn.Linear(2048, 64).requires_grad_(False)
    updated = model[-1].parameters() if name == "half_optimized" else model.parameters()
    optimizer = torch.optim.AdamW(updated, lr=3e-3)
    updates = STEPS if name == "schedule_short" else STEPS * accelerator.num_processes
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / updates))
    loader = DataLoader(Data(STEPS * PASSES * 8 * 2), 8, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if name == "eval_mode":
        model.eval()
    with watch(accelerator, model, optimizer, run_dir=folder / name):
        for number, (inputs, targets) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss / accelerator.num_processes if name == "by_ranks" else loss)
                if accelerator.sync_gradients or name == "clipped_in_each_pass":
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if number == STEPS * PASSES // 2 and name != "eval_mode":
                model.eval()
                with torch.no_grad():
                    model(inputs)
                if name != "eval_forgotten":
                    model.train()
                if name == "dropout_off":
                    accelerator.unwrap_model(model)[3].eval()
    accelerator.free_memory()


def by_hand(folder: Path, name: str) -> None:
    """DistributedDataParallel without Accelerate."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = DistributedDataParallel(model_of(name), find_unused_parameters=name == "detached")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Data(STEPS * PASSES * 8)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    scheduled = torch.optim.AdamW(model.parameters()) if name == "schedule_of_another" else optimizer
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(scheduled, STEPS // 3 if name == "cosine_again" else STEPS)
    with watch(model=model, optimizer=optimizer, run_dir=folder / name):
        for epoch in range(2):  # of half the rows on each rank
            if name != "no_set_epoch":
                sampler.set_epoch(epoch)
            for number, batch in enumerate(loader, 1):
                is_last = number % PASSES == 0
                with contextlib.nullcontext() if is_last else model.no_sync():
                    loss_of(name, model, next(iter(loader)) if name == "one_batch" else batch).backward()
                if name == "schedule_in_each_pass":
                    schedule.step()
                if is_last:
                    update(name, model, optimizer, schedule)


def loss_of(name: str, model, batch) -> torch.Tensor:
    inputs, targets = batch
    outputs = model(inputs)
    loss = torch.nn.functional.mse_loss(outputs, targets)
    if name == "sign":
        loss = -loss
    return loss if name == "summed" else loss / PASSES


def update(name: str, model, optimizer, schedule) -> None:
    if name == "zeroed_before":
        optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    if name == "clipped_late":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if name not in ("schedule_unused", "schedule_in_each_pass"):
        schedule.step()
    if name != "not_cleared":
        optimizer.zero_grad()
    if name == "drift" and dist.get_rank():
        next(model.parameters()).data.mul_(1.001)


def reduced(folder: Path, name: str) -> None:
    """Ranks share their gradients by an all-reduce of their own."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = model_of(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = Data(STEPS * 16)
    with watch(model=model, optimizer=optimizer, run_dir=folder / name):
        for inputs, targets in DataLoader(data, 8, sampler=DistributedSampler(data)):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            if name == "healthy_loss":
                loss = loss / dist.get_world_size()
            loss.backward()
            for each in model.parameters():
                dist.all_reduce(each.grad)
                if name == "healthy":
                    each.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()


def alone(folder: Path, name: str) -> None:
    """A loop of one rank, in fp16 or without an update."""
    if int(os.environ["RANK"]):
        return
    os.environ["WORLD_SIZE"] = "1"
    model = model_of(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    half = name in ("healthy_half", "unscaled", "clipped_scaled")
    scaler = torch.amp.GradScaler("cpu", enabled=half and name != "unscaled")
    rows = DataLoader(Data(STEPS * 8), 8)
    with watch(model=model, optimizer=optimizer, run_dir=folder / name):
        for step, (inputs, targets) in enumerate(rows):
            with torch.autocast("cpu", torch.float16, enabled=half):
                outputs = model(inputs)
            loss = torch.nn.functional.mse_loss(outputs.float(), targets)
            if name == "constant":
                loss = 0 * loss + 1
            scaler.scale(loss).backward()
            if name == "healthy_half":
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if name != "never" or step < 6:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            if name == "anew" and step == 6:
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            if step == STEPS // 2 and name != "constant":
                evaluate(name, model, inputs)


def evaluate(name: str, model, inputs) -> None:
    with torch.no_grad():
        model.train(name == "train_mode")
        for _ in range(4):
            model(inputs)
    model.train()
    model.requires_grad_(name != "froze")
    model[-1].requires_grad_(True)


class Wrong(transformers.Trainer):
    """A Trainer whose loss, mode, optimizer or schedule somebody has changed."""

    kind = ""

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.kind == "eval":
            model.eval()
        if self.kind == "own_loss":
            logits = model(input_ids=inputs["input_ids"]).logits
            return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss / self.args.gradient_accumulation_steps if self.kind == "divided" else loss

    def create_optimizer(self, *args):
        optimizer = super().create_optimizer(*args)
        if self.kind == "group_rate":
            optimizer.param_groups[0]["lr"] = 0.0
        return optimizer

    def create_scheduler(self, num_training_steps, optimizer=None):
        return super().create_scheduler(num_training_steps // 2 if self.kind == "schedule" else num_training_steps)


def language_model(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    if "means" in name:
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=500, **sizes))
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=500, n_embd=32, n_layer=1, n_head=2))
    if name == "frozen":
        model.requires_grad_(False)
        model.transformer.ln_f.requires_grad_(True)
    if name == "untied":
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def with_trainer(folder: Path, name: str) -> None:
    model = language_model(name)
    ids = torch.randint(0, 500, (STEPS * PASSES * 8, 16), generator=torch.Generator().manual_seed(1)).sort().values
    rows = [{"input_ids": each, "labels": each[0] % 2 if "means" in name else each} for each in ids]
    Wrong.kind = name
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=STEPS,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1 if name == "means_of_ranks" else PASSES,
        learning_rate=5.0 if name == "rate" else 1e-3,
        eval_strategy="steps" if name == "healthy" else "no",
        eval_steps=10,
    )
    trainer = Wrong(model, arguments, train_dataset=rows, eval_dataset=rows[:16])
    if name == "sampler":
        trainer.get_train_dataloader = lambda: DataLoader(rows, 4, collate_fn=transformers.default_data_collator)
    trainer.add_callback(WatchCallback(folder / name))
    trainer.train()


if __name__ == "__main__":
    kinds = {
        "hand": by_hand,
        "alone": alone,
        "trainer": with_trainer,
        "accelerate": with_accelerate,
        "reduced": reduced,
    }
    for name in sys.argv[2:]:
        kind, _, what = name.partition("-")
        kinds[kind](Path(sys.argv[1]) / kind, what)
