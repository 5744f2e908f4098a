"""DeepSpeed by its own interface or through Accelerate, and DDP through Accelerate.

Settings: accelerate, stage (None: DDP), offload (cpu or nvme), hpz, tensor (AutoTP), sequence (Ulysses).
"""

import logging
import os
from types import SimpleNamespace

logging.disable(logging.WARNING)
os.environ.update(DS_ACCELERATOR="cpu", TORCHDYNAMO_DISABLE="1")  # nothing here is compiled

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)


def configuration(options):
    """Return DeepSpeed's settings. Clipping is switched off explicitly: its default changed to 1.0."""
    settings, pure = options.settings, options.precision == "bf16_pure"
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": options.passes,
        "gradient_clipping": options.clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero_section(options),
        "bf16": {"enabled": options.precision.startswith("bf16")},
        "fp16": {"enabled": options.precision == "fp16"},
    }
    if pure:
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if options.precision == "autocast":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    if "tensor" in settings:
        config["tensor_parallel"] = {"autotp_size": settings["tensor"]}
    if "sequence" in settings:
        config["sequence_parallel_size"] = settings["sequence"]
    return config


def zero_section(options):
    settings = options.settings
    section = {"stage": settings["stage"]}
    if options.bucket:
        section |= {"reduce_bucket_size": options.bucket, "allgather_bucket_size": options.bucket}
    if settings["stage"] == 3:
        section |= {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
        section |= {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    if "hpz" in settings:
        section["zero_hpz_partition_size"] = settings["hpz"]
    if "offload" in settings:
        place = {"device": settings["offload"], "pin_memory": False, "nvme_path": options.folder}
        section["offload_optimizer"] = place
        if settings["stage"] == 3 and settings["offload"] == "cpu":
            section["offload_param"] = place
    return section


def build(model, optimizer, options):
    if options.settings.get("accelerate"):
        return through_accelerate(model, optimizer, options)
    config = configuration(options)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=options.scheduler)
    return SimpleNamespace(model=engine, engine=engine, accelerator=None, passes=options.passes)


def through_accelerate(model, optimizer, options):
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedDataParallelKwargs

    stage = options.settings["stage"]
    if options.precision not in ("fp32", "autocast", *(["bf16"] if stage else [])):
        raise NotImplementedError(f"Accelerate has no such precision here: {options.precision}")
    if AcceleratorState._shared_state:  # Accelerate keeps one state for all trainings of a process
        if stage:
            raise NotImplementedError("Accelerate trains one DeepSpeed model in a process")
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    more = {}
    if stage:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        more["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=configuration(options))
    else:
        bucket_mib = options.bucket * 4 / 2**20 if options.bucket else 25
        ddp = DistributedDataParallelKwargs(bucket_cap_mb=bucket_mib, find_unused_parameters=options.unused)
        more["kwargs_handlers"] = [ddp]
        more["mixed_precision"] = "bf16" if options.precision == "autocast" else "no"
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.passes, **more)
    scheduler = options.scheduler and options.scheduler(optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    engine = model if stage else None
    return SimpleNamespace(
        model=model, engine=engine, optimizer=optimizer, scheduler=scheduler, accelerator=accelerator, norm=None,
        clip=options.clip,
    )  # fmt: skip


def forward_backward(trainer, batch, last=True, mode="train"):
    trainer.model.train(mode != "evaluate")
    if trainer.accelerator and mode == "train":
        return accelerated(trainer, batch, last)
    with torch.set_grad_enabled(mode != "evaluate"):
        loss = trainer.model(*batch)
    if mode == "train":
        if trainer.passes == 1:
            trainer.engine.set_gradient_accumulation_boundary(last)
        trainer.engine.backward(loss)
        if not last and trainer.passes > 1:
            trainer.engine.step()  # DeepSpeed counts the passes, and updates after the last of them
    return loss


def accelerated(trainer, batch, last):
    trainer.accelerator.gradient_state._set_sync_gradients(last)  # as accelerator.accumulate does
    if last:
        loss = trainer.model(*batch)
        trainer.accelerator.backward(loss)
        return loss
    with trainer.accelerator.no_sync(trainer.model):
        loss = trainer.model(*batch)
        trainer.accelerator.backward(loss)
    return loss


def step(trainer):
    if not trainer.accelerator:
        return trainer.engine.step()
    # Under DeepSpeed, Accelerate's backward has done the step already, and this call returns the norm.
    trainer.norm = trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), trainer.clip or float("inf"))
    trainer.optimizer.step()
    if trainer.scheduler:
        trainer.scheduler.step()
    trainer.optimizer.zero_grad()


def whole_weights(trainer):
    from deepspeed.utils import safe_get_full_fp32_param

    module = trainer.model.module if hasattr(trainer.model, "module") else trainer.model
    parameters = dict(module.named_parameters())
    sharded = bool(trainer.engine) and trainer.engine.zero_optimization_stage() == 3
    with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=sharded):
        plain = {name: parameter.detach().float().clone() for name, parameter in parameters.items()}
    if next(iter(parameters.values())).dtype == torch.float32:
        return plain
    masters = {name: safe_get_full_fp32_param(parameter) for name, parameter in parameters.items()}
    return plain | {name: master for name, master in masters.items() if master is not None}


def gradient_norm(trainer):
    return trainer.norm if trainer.accelerator else trainer.engine.get_global_grad_norm()


def save(trainer, folder):
    if not trainer.accelerator:
        return trainer.engine.save_checkpoint(folder, tag="conform")
    if trainer.scheduler:
        trainer.accelerator.register_for_checkpointing(trainer.scheduler)
    trainer.accelerator.save_state(folder)


def load(trainer, folder, weights_only=False):
    only = {"load_module_only": weights_only, "load_optimizer_states": not weights_only}
    if not trainer.accelerator:
        return trainer.engine.load_checkpoint(folder, tag="conform", **only)
    if weights_only and not trainer.engine:
        raise NotImplementedError("load_state has no option for weights only")
    if trainer.scheduler:
        trainer.accelerator.register_for_checkpointing(trainer.scheduler)
    trainer.accelerator.load_state(folder, **(only if trainer.engine else {}))
