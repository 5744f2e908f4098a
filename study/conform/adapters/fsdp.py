"""PyTorch's FSDP2, over all ranks or in groups of them (HSDP). Setting: replicas."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

BF16 = torch.bfloat16


def build(model, optimizer, options):
    # fully_shard makes new parameters, so those of the optimizer are found again by their names.
    names = {parameter: name for name, parameter in model.named_parameters()}
    if options.precision == "bf16_pure":
        model.bfloat16()
    shape, places = (dist.get_world_size(),), None
    if replicas := options.settings.get("replicas"):
        shape, places = (replicas, shape[0] // replicas), ("between", "within")
    common = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=places)}
    if options.precision == "bf16":
        common["mp_policy"] = MixedPrecisionPolicy(BF16, torch.float32)
    # A weight that two blocks share is sharded by the root, and so are then the blocks.
    if len(names) == len(list(model.named_parameters(remove_duplicate=False))):
        for block in model.blocks:
            fully_shard(block, **common)
    fully_shard(model, **common)  # all that no block has
    sharded = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [sharded[names[parameter]] for parameter in group["params"]]
    scheduler = options.schedule(optimizer)
    return SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler, options=options)


def forward_backward(trainer, batch, last=True, mode="train"):
    trainer.model.set_requires_gradient_sync(last)  # until then each rank keeps whole gradients
    autocast = torch.autocast("cpu", BF16, enabled=trainer.options.precision == "autocast")
    with torch.set_grad_enabled(mode != "evaluate"), autocast:
        loss = trainer.model(*batch)
    if mode == "train":
        (loss / trainer.options.passes).backward()
    return loss


def step(trainer):
    norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.options.clip or float("inf"))
    trainer.optimizer.step()
    trainer.scheduler.step()
    trainer.optimizer.zero_grad()
    return norm.full_tensor()  # until then each rank has its part


def whole_weights(trainer):
    return {name: weight.full_tensor() for name, weight in trainer.model.named_parameters()}


def _state(trainer):
    model, optimizer = states.get_state_dict(trainer.model, trainer.optimizer)
    return {"model": model, "optimizer": optimizer, "schedule": trainer.scheduler.state_dict()}


def save(trainer, folder):
    torch.distributed.checkpoint.save(_state(trainer), checkpoint_id=folder)


def load(trainer, folder, weights_only=False):
    if weights_only:  # to ask for the optimizer's state would create it
        weights = states.get_model_state_dict(trainer.model)
        torch.distributed.checkpoint.load({"model": weights}, checkpoint_id=folder)
        states.set_model_state_dict(trainer.model, weights)
        return
    state = _state(trainer)
    torch.distributed.checkpoint.load(state, checkpoint_id=folder)
    both = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    states.set_state_dict(trainer.model, trainer.optimizer, **both)
    trainer.scheduler.load_state_dict(state["schedule"])
