"""PyTorch alone: one process, or DistributedDataParallel."""

import contextlib
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

AUTOCAST = {"autocast": torch.bfloat16, "fp16": torch.float16}


def build(model, optimizer, options):
    masters = {}
    if options.precision.startswith("bf16"):
        with_master = options.precision == "bf16"
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        masters = {parameter: parameter.detach().clone() for parameter in trained} if with_master else {}
        model.bfloat16()
        for group in optimizer.param_groups if with_master else []:
            group["params"] = [masters.get(parameter, parameter) for parameter in group["params"]]
    wrapped = model
    if dist.get_world_size() > 1:
        bucket_mib = 25 if not options.bucket else options.bucket * 4 / 2**20
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=bucket_mib, find_unused_parameters=options.unused, gradient_as_bucket_view=True
        )
    scaler = torch.amp.GradScaler("cpu", enabled=options.precision == "fp16")
    scheduler = options.scheduler and options.scheduler(optimizer)
    return SimpleNamespace(
        model=model, wrapped=wrapped, optimizer=optimizer, scheduler=scheduler, scaler=scaler, masters=masters,
        norm=None, options=options,
    )  # fmt: skip


def forward_backward(trainer, batch, last=True, mode="train"):
    quiet = contextlib.nullcontext() if last or trainer.wrapped is trainer.model else trainer.wrapped.no_sync()
    dtype = AUTOCAST.get(trainer.options.precision)
    with torch.set_grad_enabled(mode != "evaluate"), quiet:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = (trainer.model if mode == "evaluate" else trainer.wrapped)(*batch)
        if mode == "train":
            trainer.scaler.scale(loss / trainer.options.passes).backward()
    return loss


def step(trainer):
    parameters = list(trainer.model.parameters())
    for parameter, master in trainer.masters.items():
        master.grad = None if parameter.grad is None else parameter.grad.float()
    trainer.scaler.unscale_(trainer.optimizer)
    clipped = list(trainer.masters.values()) or parameters
    trainer.norm = torch.nn.utils.clip_grad_norm_(clipped, trainer.options.clip or float("inf"))
    trainer.scaler.step(trainer.optimizer)
    trainer.scaler.update()
    if trainer.scheduler:
        trainer.scheduler.step()
    with torch.no_grad():
        for parameter, master in trainer.masters.items():
            parameter.copy_(master)
    trainer.model.zero_grad()


def whole_weights(trainer):
    return {name: trainer.masters.get(weight, weight) for name, weight in trainer.model.named_parameters()}


def gradient_norm(trainer):
    return trainer.norm


def save(trainer, folder):
    state = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    state["masters"] = list(trainer.masters.values())
    state["scheduler"] = trainer.scheduler and trainer.scheduler.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, f"{folder}.pt")
    dist.barrier()


def load(trainer, folder, weights_only=False):
    state = torch.load(f"{folder}.pt", weights_only=True)
    trainer.model.load_state_dict(state["model"])
    with torch.no_grad():
        for master, saved in zip(trainer.masters.values(), state["masters"], strict=True):
            master.copy_(saved)
    if not weights_only:
        trainer.optimizer.load_state_dict(state["optimizer"])
    if trainer.scheduler and not weights_only:
        trainer.scheduler.load_state_dict(state["scheduler"])
