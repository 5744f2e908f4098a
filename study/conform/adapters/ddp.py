"""PyTorch alone: one process, or DistributedDataParallel."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

PARTS = ("model", "optimizer", "scheduler")  # of a checkpoint


def build(model, optimizer, options):
    if options.precision == "bf16":
        raise NotImplementedError("DDP has no fp32 master weights of its own")
    if options.precision == "bf16_pure":
        model.bfloat16()
    wrapped = model
    if dist.get_world_size() > 1:
        bucket_mib = options.bucket * 4 / 2**20 or 25  # of fp32; 25 MiB is PyTorch's own default
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=bucket_mib, find_unused_parameters=options.unused, gradient_as_bucket_view=True
        )
    scheduler = options.schedule(optimizer)
    return SimpleNamespace(model=model, wrapped=wrapped, optimizer=optimizer, scheduler=scheduler, options=options)


def forward_backward(trainer, batch, last=True, mode="train"):
    trainer.wrapped.require_backward_grad_sync = last  # all that DDP's no_sync() sets; one process has no use for it
    # An evaluation calls the model itself: DDP's own forward pass is for training.
    model = {"evaluate": trainer.model}.get(mode, trainer.wrapped)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=trainer.options.precision == "autocast")
    with torch.set_grad_enabled(mode != "evaluate"), autocast:
        loss = model(*batch)
    if mode == "train":
        (loss / trainer.options.passes).backward()
    return loss


def step(trainer):
    norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.options.clip or float("inf"))
    trainer.optimizer.step()
    trainer.scheduler.step()
    trainer.model.zero_grad()
    return norm


def whole_weights(trainer):
    return dict(trainer.model.named_parameters())


def save(trainer, folder):
    if dist.get_rank() == 0:  # all ranks hold the same
        torch.save({name: getattr(trainer, name).state_dict() for name in PARTS}, f"{folder}.pt")
    dist.barrier()


def load(trainer, folder, weights_only=False):
    state = torch.load(f"{folder}.pt", weights_only=True)
    if weights_only:
        del state["optimizer"]
    for name, values in state.items():
        getattr(trainer, name).load_state_dict(values)
