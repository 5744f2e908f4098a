"""DDP, DeepSpeed or FSDP2 through Accelerate. Settings: stage; 0 is DDP, or FSDP2 with fsdp: more of its arguments."""

from study.conform.adapters.deepspeed_common import configuration, full_weights  # isort: skip

import contextlib
import os
from types import SimpleNamespace

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, FullyShardedDataParallelPlugin

with contextlib.suppress(ImportError):
    import transformers  # noqa: F401 -- so that not each rank imports it


def build(model, optimizer, options):
    stage, fsdp = options.settings["stage"], "fsdp" in options.settings
    own_half, plugin = ("bf16", in_fsdp if fsdp else in_stage) if stage or fsdp else ("autocast", in_ddp)
    if options.precision not in ("fp32", own_half) and not (stage and options.precision == "autocast"):
        raise NotImplementedError(f"Accelerate has no such precision here: {options.precision}")
    if AcceleratorState._shared_state:  # Accelerate keeps one state for all trainings of a process
        if stage:
            raise NotImplementedError("Accelerate trains one DeepSpeed model in a process")
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    half = options.precision == own_half
    common = {"gradient_accumulation_steps": options.passes, "mixed_precision": "bf16" if half else "no"}
    accelerator = Accelerator(cpu=not stage, **common, **plugin(model, options))
    assert (accelerator.distributed_type in ("DEEPSPEED", "FSDP")) == bool(stage or fsdp), "it would be DDP"
    scheduler = options.scheduler and options.scheduler(optimizer)
    if scheduler:
        accelerator.register_for_checkpointing(scheduler)
    model, optimizer = accelerator.prepare(model, optimizer)
    return SimpleNamespace(
        accelerator=accelerator, model=model, optimizer=optimizer, scheduler=scheduler, clip=options.clip, norm=None
    )


def in_stage(model, options):
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=configuration(options))}


def in_ddp(model, options):
    bucket_mib = options.bucket * 4 / 2**20 or 25
    ddp = DistributedDataParallelKwargs(bucket_cap_mb=bucket_mib, find_unused_parameters=options.unused)
    return {"kwargs_handlers": [ddp]}


def in_fsdp(model, options):
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # Accelerate has FSDP only there
    tied = len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False)))
    wrap = {"auto_wrap_policy": "no_wrap" if tied else "transformer_based_wrap"}
    wrap["transformer_cls_names_to_wrap"] = [type(block).__name__ for block in model.blocks][:1]
    given = {"fsdp_version": 2, "cpu_ram_efficient_loading": False, "state_dict_type": "SHARDED_STATE_DICT"}
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(**given | wrap | options.settings["fsdp"])}


def forward_backward(trainer, batch, last=True, mode="train"):
    trainer.model.train(mode != "evaluate")
    if mode != "train":
        with torch.set_grad_enabled(mode != "evaluate"):
            return trainer.model(*batch)
    trainer.accelerator.gradient_state._set_sync_gradients(last)  # as accelerator.accumulate does
    with contextlib.nullcontext() if last else trainer.accelerator.no_sync(trainer.model):
        loss = trainer.model(*batch)
        trainer.accelerator.backward(loss)
    return loss


def step(trainer):
    # Under DeepSpeed, Accelerate's backward has done the step already, and this call returns the norm.
    trainer.norm = trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), trainer.clip or float("inf"))
    trainer.optimizer.step()
    if trainer.scheduler:
        trainer.scheduler.step()
    trainer.optimizer.zero_grad()


def whole_weights(trainer):
    model = getattr(trainer.model, "module", trainer.model)
    if trainer.accelerator.distributed_type != "FSDP":
        return full_weights(model)
    return {name: weight.full_tensor() for name, weight in model.named_parameters()}


def gradient_norm(trainer):
    return trainer.norm.full_tensor() if hasattr(trainer.norm, "full_tensor") else trainer.norm


def save(trainer, folder):
    trainer.accelerator.save_state(folder)


def load(trainer, folder, weights_only=False):
    deepspeed_here = trainer.accelerator.distributed_type == "DEEPSPEED"
    if weights_only and not deepspeed_here:
        raise NotImplementedError("load_state has no option for weights only")
    only = {"load_module_only": weights_only, "load_optimizer_states": not weights_only}
    trainer.accelerator.load_state(folder, **(only if deepspeed_here else {}))
