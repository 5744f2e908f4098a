"""PyTorch's FSDP1 and FSDP2, and FSDP2 in groups of ranks (HSDP). Settings: version, replicas."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

BF16 = torch.bfloat16


def build(model, optimizer, options):
    if options.precision == "fp16":
        raise NotImplementedError("this adapter has no loss scale")
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    if options.precision == "bf16_pure":
        model.bfloat16()
    first = options.settings["version"] == 1
    wrapped = (_version_1 if first else _version_2)(model, options)
    sharded = {name.replace("_fsdp_wrapped_module.", ""): weight for name, weight in wrapped.named_parameters()}
    for group, members in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [sharded[name] for name in members]
    scheduler = options.scheduler and options.scheduler(optimizer)
    return SimpleNamespace(wrapped=wrapped, optimizer=optimizer, scheduler=scheduler, norm=None, options=options)


def _version_1(model, options):
    half = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32) if options.precision == "bf16" else None
    common = {"use_orig_params": True, "mixed_precision": half, "device_id": torch.device("cpu")}
    for number, block in enumerate(model.blocks):
        if not _shared(block, model):
            model.blocks[number] = FullyShardedDataParallel(block, **common)
    return FullyShardedDataParallel(model, **common)


def _version_2(model, options):
    ranks, replicas = dist.get_world_size(), options.settings.get("replicas", 1)
    if replicas == 1:
        mesh = init_device_mesh("cpu", (ranks,))
    else:
        mesh = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("between", "within"))
    half = MixedPrecisionPolicy(BF16, torch.float32)
    common = {"mesh": mesh} | ({"mp_policy": half} if options.precision == "bf16" else {})
    for block in model.blocks:
        if not _shared(block, model):
            fully_shard(block, **common)
    return fully_shard(model, **common)


def _shared(block, model):
    """Return whether another module has a parameter of this block: then the root shards it."""
    mine = {id(parameter) for parameter in block.parameters()}
    return any(
        id(parameter) in mine
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if module not in set(block.modules())
    )


def forward_backward(trainer, batch, last=True, mode="train"):
    if isinstance(trainer.wrapped, FSDPModule):
        trainer.wrapped.set_requires_gradient_sync(last)
    autocast = torch.autocast("cpu", BF16, enabled=trainer.options.precision == "autocast")
    with torch.set_grad_enabled(mode != "evaluate"), autocast:
        loss = trainer.wrapped(*batch)
    if mode == "train":
        (loss / trainer.options.passes).backward()
    return loss


def step(trainer):
    limit = trainer.options.clip or float("inf")
    if isinstance(trainer.wrapped, FSDPModule):
        norm = torch.nn.utils.clip_grad_norm_(trainer.wrapped.parameters(), limit)
        trainer.norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    else:
        trainer.norm = trainer.wrapped.clip_grad_norm_(limit)
    trainer.optimizer.step()
    if trainer.scheduler:
        trainer.scheduler.step()
    trainer.optimizer.zero_grad()


def whole_weights(trainer):
    whole = states.StateDictOptions(full_state_dict=True)
    weights = states.get_model_state_dict(trainer.wrapped, options=whole)
    everybody = [weights]
    dist.broadcast_object_list(everybody)  # FSDP gives whole weights to the first rank, or to all
    return everybody[0]


def gradient_norm(trainer):
    return trainer.norm


def save(trainer, folder):
    model, optimizer = states.get_state_dict(trainer.wrapped, trainer.optimizer)
    schedule = trainer.scheduler.state_dict() if trainer.scheduler else {}
    torch.distributed.checkpoint.save(
        {"model": model, "optimizer": optimizer, "schedule": schedule}, checkpoint_id=folder
    )


def load(trainer, folder, weights_only=False):
    if weights_only:
        weights = {"model": states.get_model_state_dict(trainer.wrapped)}
        torch.distributed.checkpoint.load(weights, checkpoint_id=folder)
        states.set_model_state_dict(trainer.wrapped, weights["model"])
        return
    model, optimizer = states.get_state_dict(trainer.wrapped, trainer.optimizer)
    schedule = trainer.scheduler.state_dict() if trainer.scheduler else {}
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    torch.distributed.checkpoint.load(state, checkpoint_id=folder)
    both = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    states.set_state_dict(trainer.wrapped, trainer.optimizer, **both)
    if trainer.scheduler:
        trainer.scheduler.load_state_dict(state["schedule"])
