"""DDP, DeepSpeed or FSDP2 through Accelerate. Settings: way; stage; fsdp: more of FSDP's arguments."""

from study.conform.adapters.deepspeed_common import configuration, full_weights, parts  # isort: skip

import contextlib
import os
from types import SimpleNamespace

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, FullyShardedDataParallelPlugin

with contextlib.suppress(ImportError):
    import transformers  # noqa: F401 -- so that not each rank imports it


def build(model, optimizer, options):
    way = options.settings["way"]
    plugin, mixed_precision = WAYS[way]
    if model.is_sparse:
        raise NotImplementedError("Accelerate clips gradients by PyTorch's function, which takes no sparse ones")
    if options.precision not in mixed_precision:
        raise NotImplementedError(f"Accelerate has no such precision here: {options.precision}")
    accelerator = Accelerator(
        cpu=way != "DEEPSPEED",
        gradient_accumulation_steps=options.passes,
        mixed_precision=mixed_precision[options.precision],
        **plugin(model, options),
    )
    assert way in (accelerator.distributed_type, "DDP"), "it would be DDP"
    # Not prepared: Accelerate would step it once for each rank (accelerate/scheduler.py).
    scheduler = options.schedule(optimizer)
    accelerator.register_for_checkpointing(scheduler)
    model, optimizer = accelerator.prepare(model, optimizer)
    return SimpleNamespace(
        accelerator=accelerator, model=model, optimizer=optimizer, scheduler=scheduler, clip=options.clip
    )


def in_stage(model, options):
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=configuration(options))}


def in_ddp(model, options):
    ddp = DistributedDataParallelKwargs(
        bucket_cap_mb=options.bucket * 4 / 2**20 or 25, find_unused_parameters=model.may_leave_some
    )
    return {"kwargs_handlers": [ddp]}


def in_fsdp(model, options):
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # Accelerate has FSDP only there
    # A shared weight is sharded by the root.
    policy = "no_wrap" if model.shares else "transformer_based_wrap"
    given = {
        "fsdp_version": 2,
        "cpu_ram_efficient_loading": False,
        "state_dict_type": "SHARDED_STATE_DICT",
        "auto_wrap_policy": policy,
        "transformer_cls_names_to_wrap": [type(model.blocks[0]).__name__],
    }
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(**given | options.settings["fsdp"])}


# What Accelerate gets for a way to shard, and its own name for each precision. DeepSpeed's autocast is in its config.
WAYS = {
    "DDP": (in_ddp, {"fp32": "no", "autocast": "bf16"}),
    "DEEPSPEED": (in_stage, {"fp32": "no", "autocast": "no", "bf16": "bf16", "fp16": "fp16"}),
    "FSDP": (in_fsdp, {"fp32": "no", "bf16": "bf16"}),
}


def forward_backward(trainer, batch, last=True, mode="train"):
    trainer.model.train(mode != "evaluate")
    trainer.accelerator.gradient_state._set_sync_gradients(last)  # as accelerator.accumulate does
    with (
        contextlib.nullcontext() if last else trainer.accelerator.no_sync(trainer.model),
        torch.set_grad_enabled(mode != "evaluate"),
    ):
        loss = trainer.model(*batch)
        if mode == "inner":
            loss = (loss + inner(trainer)(*batch)) / 2
        if mode in ("train", "inner"):
            trainer.accelerator.backward(loss)
    return loss


def loss_scale(trainer):
    return trainer.optimizer.optimizer.loss_scale


def inner(trainer):
    if trainer.accelerator.distributed_type == "FSDP":
        raise NotImplementedError("FSDP2 shards the model itself, and wraps no module")
    return trainer.accelerator.unwrap_model(trainer.model)


def step(trainer):
    # Under DeepSpeed, Accelerate's backward has done the step already, and this call returns the norm.
    norm = trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), trainer.clip or float("inf"))
    trainer.optimizer.step()
    trainer.scheduler.step()
    trainer.optimizer.zero_grad()
    return getattr(norm, "full_tensor", lambda: norm)()  # under FSDP2 each rank has its part


def whole_weights(trainer):
    model = getattr(trainer.model, "module", trainer.model)
    if trainer.accelerator.distributed_type != "FSDP":
        return full_weights(model)
    return {name: weight.full_tensor() for name, weight in model.named_parameters()}


def save(trainer, folder):
    trainer.accelerator.save_state(folder)


def load(trainer, folder, weights_only=False):
    how = {}
    if trainer.accelerator.distributed_type == "DEEPSPEED":
        how = parts(weights_only)
    elif weights_only:
        raise NotImplementedError("load_state has no option for weights only")
    trainer.accelerator.load_state(folder, **how)
