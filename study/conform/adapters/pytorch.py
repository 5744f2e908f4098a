"""PyTorch alone: one process or DDP; with the setting `groups`, FSDP2 in so many groups of ranks (HSDP if several)."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PARTS = ("model", "optimizer", "scheduler")  # of a checkpoint


def build(model, optimizer, options):
    # fully_shard makes new parameters, so those of the optimizer are found again by their names.
    names = {parameter: name for name, parameter in model.named_parameters()}
    if options.precision == "bf16_pure":
        model.bfloat16()
    groups = options.settings.get("groups")
    wrapped = model
    if groups:
        if model.is_sparse:
            raise NotImplementedError("FSDP2 has no sparse gradients")
        in_fsdp(model, options, groups)
    elif options.precision in ("bf16", "fp16"):
        raise NotImplementedError("DDP has no fp32 master weights of its own")
    elif dist.get_world_size() > 1:
        bucket_mib = options.bucket * 4 / 2**20 or 25  # of fp32; 25 MiB is PyTorch's own default
        wrapped = DistributedDataParallel(
            model,
            bucket_cap_mb=bucket_mib,
            find_unused_parameters=model.may_leave_some,
            gradient_as_bucket_view=True,
        )
    parameters = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [parameters[names[parameter]] for parameter in group["params"]]
    return SimpleNamespace(
        model=model,
        wrapped=wrapped,
        optimizer=optimizer,
        scheduler=options.schedule(optimizer),
        scaler=torch.amp.GradScaler(
            "cpu", 2.0**24, growth_interval=options.window, enabled=options.precision == "fp16"
        ),
        options=options,
        sharded=groups,
    )


def in_fsdp(model, options, groups):
    shape, places = (dist.get_world_size(),), None
    if groups > 1:
        shape, places = (groups, shape[0] // groups), ("between", "within")
    common = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=places)}
    if options.precision in HALVES:
        common["mp_policy"] = MixedPrecisionPolicy(HALVES[options.precision], torch.float32)
    # A weight that two blocks share is sharded by the root, and so are then the blocks.
    if not model.shares:
        for block in model.blocks:
            fully_shard(block, **common)
    fully_shard(model, **common)  # all that no block has


def forward_backward(trainer, batch, last=True, mode="train"):
    # Until the last pass each rank keeps its gradients. This is all that DDP's no_sync() sets; others do not read it.
    trainer.wrapped.require_backward_grad_sync = last
    if trainer.sharded:
        trainer.model.set_requires_gradient_sync(last)
    trainer.model.train(mode != "evaluate")
    # An evaluation calls the model itself: DDP's own forward pass is for training.
    model = trainer.model if mode == "evaluate" else trainer.wrapped
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=trainer.options.precision == "autocast")
    with torch.set_grad_enabled(mode != "evaluate"), autocast:
        loss = model(*batch)
        if mode == "inner":
            loss = (loss + inner(trainer)(*batch)) / 2
    if mode in ("train", "inner"):
        trainer.scaler.scale(loss / trainer.options.passes).backward()
    return loss


def inner(trainer):
    if trainer.sharded:
        raise NotImplementedError("FSDP2 shards the model itself, and wraps no module")
    return trainer.model


def step(trainer):
    trainer.scaler.unscale_(trainer.optimizer)
    if trainer.model.is_sparse:  # PyTorch clips no sparse gradients
        for parameter in trainer.model.parameters():
            parameter.grad = parameter.grad.to_dense()
    norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.options.clip or float("inf"))
    trainer.scaler.step(trainer.optimizer)
    trainer.scaler.update()
    trainer.scheduler.step()
    trainer.model.zero_grad()
    return whole(norm)


def loss_scale(trainer):
    return trainer.scaler.get_scale()


def whole(tensor):
    return getattr(tensor, "full_tensor", lambda: tensor)()  # under FSDP2 each rank has its part


def whole_weights(trainer):
    return {name: whole(weight) for name, weight in trainer.model.named_parameters()}


def state(trainer):
    model, optimizer = states.get_state_dict(trainer.model, trainer.optimizer)
    return {"model": model, "optimizer": optimizer, "scheduler": trainer.scheduler.state_dict()}


def save(trainer, folder):
    if trainer.sharded:
        dist.checkpoint.save(state(trainer), checkpoint_id=folder)
    elif dist.get_rank() == 0:  # all ranks hold the same
        torch.save({name: getattr(trainer, name).state_dict() for name in PARTS}, f"{folder}.pt")
    dist.barrier()


def load(trainer, folder, weights_only=False):
    if not trainer.sharded:
        saved = torch.load(f"{folder}.pt", weights_only=True)
        for name in PARTS:
            if not weights_only or name != "optimizer":
                getattr(trainer, name).load_state_dict(saved[name])
    elif weights_only:  # to ask for the optimizer's state would create it
        weights = states.get_model_state_dict(trainer.model)
        dist.checkpoint.load({"model": weights}, checkpoint_id=folder)
        states.set_model_state_dict(trainer.model, weights)
    else:
        saved = state(trainer)
        dist.checkpoint.load(saved, checkpoint_id=folder)
        states.set_state_dict(
            trainer.model,
            trainer.optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
        )
        trainer.scheduler.load_state_dict(saved["scheduler"])
