"""The rivals of our trainer on the same training: `bare`, a plain loop, and `hf`, transformers.Trainer.

python benchmarks/rivals.py bare --task imdb --model bert-tiny --data embedded --out bare.json

Starting weights, rows and their order, dropout masks, rates, optimizer, threads and clock are those of study/train.py
on one device, so only the loop around them is compared. The flags are the trainer's own.
"""

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal, cast

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import transformers
import tyro
from torch.utils.data import StackDataset

from study.core.errors import Stop, exit_on_stop
from study.core.settings import Settings, TrainerFlags, check, flag, learning_rate, resolve
from study.measure.clock import Clock
from study.measure.hardware import CUDA
from study.training import display, models, tasks
from study.training.data import Rows, load_data
from study.training.launch import set_threads

DEVICE = torch.device("cuda" if CUDA else "cpu")


def main(
    rival: tyro.conf.Positional[Literal["bare", "hf"]],
    settings: Annotated[TrainerFlags, tyro.conf.arg(name="")],
    out: Path,
) -> None:
    """Train as a rival does, and write its step times and its first and last loss.

    Args:
        rival: bare: a plain PyTorch loop. hf: transformers.Trainer.
        settings: The settings of our trainer.
        out: The JSON file to write.
    """
    settings = resolve(settings, CUDA)
    refuse(settings)
    if (steps := settings.steps) is None:
        raise Stop("the rivals take no --epochs", "give --steps")
    set_threads(settings.threads)
    display.log_to(None)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.tf32
    data = load_data(settings)
    model = models.build_model(settings, models.model_config(settings, data.vocabulary), DEVICE)
    clock = Clock()
    train = bare if rival == "bare" else hf
    losses = train(settings, steps, model, arrange(settings, steps, data.train), clock)
    first_last = torch.stack([losses[0], losses[-1]]).tolist()
    out.write_text(json.dumps({"step_s": clock.step_s[settings.warmup_steps :], "losses_first_last": first_last}))


def refuse(settings: Settings) -> None:
    """Raise Stop for settings that would make the comparison unfair."""
    check(settings)
    if settings.precision not in ("fp32", "bf16"):
        raise Stop(f"the rivals have no --precision {settings.precision}", "give fp32 or bf16")
    for name in ("weight_decay", "lr_warmup_steps"):  # a rival lacks these or does them differently
        if getattr(settings, name):
            raise Stop(f"the rivals have no {flag(name)}", "leave it out")
    can_set_scale = hasattr(transformers.Trainer, "loss_is_scaled_for_ga")  # newer than transformers 5.17
    if settings.task == "imdb" and settings.accumulation > 1 and not can_set_scale:
        raise Stop("this Trainer adds up BERT's losses over microbatches", "give --accumulation 1")
    if torch.cuda.device_count() > 1:
        raise Stop("transformers.Trainer would split the batch over all GPUs", "set CUDA_VISIBLE_DEVICES to one")


def arrange(settings: Settings, steps: int, rows: Rows) -> Rows:
    """Return the rows of the whole training in the order of our trainer, epoch after epoch."""
    count = len(rows["input_ids"])
    per_step = settings.micro_batch * settings.accumulation
    if per_step > count:
        raise Stop(f"one step needs {per_step} rows, and there are {count}", "give a smaller --micro-batch")
    per_epoch = count // per_step
    orders = []
    for epoch in range(math.ceil(steps / per_epoch)):
        generator = torch.Generator().manual_seed(settings.seed * 1000 + epoch)
        orders.append(torch.randperm(count, generator=generator)[: per_epoch * per_step])
    order = torch.cat(orders)[: steps * per_step]
    return {name: values[order] for name, values in rows.items()}


# --- the rivals ----------------------------------------------------------------------------------------------------


def bare(settings: Settings, steps: int, model: torch.nn.Module, rows: Rows, clock: Clock) -> list[torch.Tensor]:
    """Train in plain PyTorch: rows pinned beforehand, copies without waiting, losses left on the device."""
    shape = (steps, settings.accumulation, settings.micro_batch)
    batches = {name: values.unflatten(0, shape) for name, values in rows.items()}
    if CUDA:
        batches = {name: values.pin_memory() for name, values in batches.items()}
    model.to(DEVICE)
    if settings.compile:
        model = cast(torch.nn.Module, torch.compile(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, fused=True)
    losses = []
    transformers.set_seed(settings.seed)
    with clock.window(lambda: None) as tick:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(settings, step, steps)
            total: torch.Tensor | float = 0.0
            for i in range(settings.accumulation):
                batch = {name: values[step, i].to(DEVICE, non_blocking=True) for name, values in batches.items()}
                with torch.autocast(DEVICE.type, torch.bfloat16, enabled=settings.precision == "bf16"):
                    loss = tasks.row_losses(settings, model, batch)[0].mean() / settings.accumulation
                loss.backward()
                total = total + loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(torch.as_tensor(total))
            tick()
    return losses


def hf(settings: Settings, steps: int, model: torch.nn.Module, rows: Rows, clock: Clock) -> list[torch.Tensor]:
    """Train with transformers.Trainer, with every costly feature switched off that has a switch.

    Three have no switch: the gradients' norm, which it computes at every step even without clipping; its count of
    operations; and loading: it collates rows within the step, and we arrange ours before it.
    """
    if settings.task == "wikitext":
        labels = rows["input_ids"].clone()
        labels[:, 0] = -100  # nothing predicts it, and Trainer would count it in the mean for GPT-2 (transformers 5.23)
        rows = rows | {"labels": labels}
    dataset = StackDataset(**cast(dict[str, Any], rows))  # tensors have what it needs of a data set
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=settings.micro_batch,
            gradient_accumulation_steps=settings.accumulation,
            optim="adamw_torch_fused",
            learning_rate=settings.lr,
            lr_scheduler_type="linear",
            weight_decay=settings.weight_decay,
            max_grad_norm=0,
            seed=settings.seed,
            bf16=settings.precision == "bf16",
            tf32=settings.tf32 if CUDA else None,  # Trainer would turn it on for a compiled model
            use_cpu=not CUDA,
            train_sampling_strategy="sequential",
            dataloader_num_workers=0,
            dataloader_pin_memory=CUDA,
            accelerator_config={"non_blocking": CUDA},
            remove_unused_columns=False,
            logging_strategy="no",
            logging_nan_inf_filter=False,  # it reads the loss at every step, which makes a GPU wait
            eval_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            torch_compile=settings.compile,
        )
        with clock.window(lambda: None) as tick:
            callbacks = [Ticks(tick, settings.seed)]
            trainer = KeepsLosses(model, arguments, train_dataset=dataset, callbacks=callbacks)
            trainer.remove_callback(transformers.PrinterCallback)
            # BERT averages over its microbatch and ignores the row count that Trainer passes. Trainer still assumes a
            # scaled loss, and with accumulation its gradients would be too large.
            trainer.loss_is_scaled_for_ga = settings.task == "wikitext"
            trainer.train()
    return list(torch.stack(trainer.losses).unflatten(0, (steps, settings.accumulation)).sum(1))


class Ticks(transformers.TrainerCallback):
    """Ends a step of the clock where Trainer ends one, so that a step includes loading."""

    def __init__(self, tick, seed: int):
        self.tick = tick
        self.seed = seed

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            transformers.set_seed(self.seed)  # its loader has drawn a number, which would change the dropout masks

    def on_step_end(self, args, state, control, **kwargs):
        self.tick()


class KeepsLosses(transformers.Trainer):
    """Keeps the loss of each microbatch on the device. Trainer itself keeps only their running sum."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.losses: list[torch.Tensor] = []

    def training_step(self, *args, **kwargs) -> torch.Tensor:
        self.losses.append(super().training_step(*args, **kwargs))
        return self.losses[-1]


if __name__ == "__main__":
    with exit_on_stop():
        tyro.cli(main, prog="rivals.py", description=__doc__)
