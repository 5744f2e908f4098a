"""PyTorch alone: one process, or DistributedDataParallel."""

import contextlib
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def build(model, optimizer, options):
    if options.precision == "bf16":
        raise NotImplementedError("DDP has no fp32 master weights of its own")
    if options.precision == "bf16_pure":
        model.bfloat16()
    wrapped = model
    if dist.get_world_size() > 1:
        bucket_mib = options.bucket * 4 / 2**20 or 25
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=bucket_mib, find_unused_parameters=options.unused, gradient_as_bucket_view=True
        )
    scheduler = options.scheduler and options.scheduler(optimizer)
    return SimpleNamespace(model=model, wrapped=wrapped, optimizer=optimizer, scheduler=scheduler, options=options)


def forward_backward(trainer, batch, last=True, mode="train"):
    quiet = contextlib.nullcontext() if last or trainer.wrapped is trainer.model else trainer.wrapped.no_sync()
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=trainer.options.precision == "autocast")
    with torch.set_grad_enabled(mode != "evaluate"), quiet:
        with autocast:
            loss = (trainer.model if mode == "evaluate" else trainer.wrapped)(*batch)
        if mode == "train":
            (loss / trainer.options.passes).backward()
    return loss


def step(trainer):
    trainer.norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.options.clip or float("inf"))
    trainer.optimizer.step()
    if trainer.scheduler:
        trainer.scheduler.step()
    trainer.model.zero_grad()


def whole_weights(trainer):
    return dict(trainer.model.named_parameters())


def gradient_norm(trainer):
    return trainer.norm


def _stateful(trainer, weights_only=False):
    parts = {"model": trainer.model}
    if not weights_only:
        parts["optimizer"] = trainer.optimizer
    if trainer.scheduler:
        parts["scheduler"] = trainer.scheduler
    return parts


def save(trainer, folder):
    state = {name: part.state_dict() for name, part in _stateful(trainer).items()}
    if dist.get_rank() == 0:
        torch.save(state, f"{folder}.pt")
    dist.barrier()


def load(trainer, folder, weights_only=False):
    state = torch.load(f"{folder}.pt", weights_only=True)
    for name, part in _stateful(trainer, weights_only).items():
        part.load_state_dict(state[name])
