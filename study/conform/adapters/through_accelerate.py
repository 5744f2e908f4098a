"""DDP, DeepSpeed or FSDP2 through Accelerate. Settings: stage; 0 is DDP, or FSDP2 with fsdp."""

from study.conform.adapters.deepspeed_common import configuration, full_weights  # isort: skip

import contextlib
import os
from types import SimpleNamespace

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin

with contextlib.suppress(ImportError):
    import transformers  # noqa: F401 -- so that not each rank imports it


def build(model, optimizer, options):
    stage = options.settings["stage"]
    if "fsdp" in options.settings:
        plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False)
        plugin.fsdp_version = 2  # old releases have no such argument
        made = Accelerator(cpu=True, fsdp_plugin=plugin).distributed_type.value
        raise NotImplementedError(f"without a GPU Accelerate makes FSDP into {made}")
    if options.precision not in ("fp32", "autocast", *(["bf16"] if stage else [])):
        raise NotImplementedError(f"Accelerate has no such precision here: {options.precision}")
    if AcceleratorState._shared_state:  # Accelerate keeps one state for all trainings of a process
        if stage:
            raise NotImplementedError("Accelerate trains one DeepSpeed model in a process")
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    if stage:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        more = {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=configuration(options, zero_section(stage)))}
        more["mixed_precision"] = "bf16" if options.precision == "bf16" else "no"
    else:
        bucket_mib = options.bucket * 4 / 2**20 if options.bucket else 25
        ddp = DistributedDataParallelKwargs(bucket_cap_mb=bucket_mib, find_unused_parameters=options.unused)
        more = {"kwargs_handlers": [ddp], "mixed_precision": "bf16" if options.precision == "autocast" else "no"}
    accelerator = Accelerator(cpu=not stage, gradient_accumulation_steps=options.passes, **more)
    assert (accelerator.distributed_type == "DEEPSPEED") == bool(stage), "cpu=True would give DDP"
    scheduler = options.scheduler and options.scheduler(optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    return SimpleNamespace(
        accelerator=accelerator, model=model, optimizer=optimizer, scheduler=scheduler, clip=options.clip, norm=None
    )


def zero_section(stage):
    more = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0} if stage == 3 else {}
    return {"stage": stage} | more


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
    return full_weights(getattr(trainer.model, "module", trainer.model))


def gradient_norm(trainer):
    return trainer.norm


def save(trainer, folder):
    if trainer.scheduler:
        trainer.accelerator.register_for_checkpointing(trainer.scheduler)
    trainer.accelerator.save_state(folder)


def load(trainer, folder, weights_only=False):
    deepspeed_here = trainer.accelerator.distributed_type == "DEEPSPEED"
    if weights_only and not deepspeed_here:
        raise NotImplementedError("load_state has no option for weights only")
    if trainer.scheduler:
        trainer.accelerator.register_for_checkpointing(trainer.scheduler)
    only = {"load_module_only": weights_only, "load_optimizer_states": not weights_only}
    trainer.accelerator.load_state(folder, **(only if deepspeed_here else {}))
