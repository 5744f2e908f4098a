"""DeepSpeed's own interface. Settings: stage, offload (cpu or nvme), hpz, tensor (ranks that share a layer)."""

import logging
import os

logging.disable(logging.WARNING)
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # DeepSpeed would load the whole compiler, and compiles nothing here

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)


def configuration(options):
    """Return DeepSpeed's settings. Clipping is switched off explicitly: its default changed to 1.0."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": options.passes,
        "gradient_clipping": options.clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero_section(options),
    }
    if options.precision == "autocast":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    if options.precision.startswith("bf16"):
        pure = options.precision == "bf16_pure"
        states = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True} if pure else {}
        config["bf16"] = {"enabled": True} | states
    if options.precision == "fp16":
        config["fp16"] = {"enabled": True}
    return config


def zero_section(options):
    settings = options.settings
    section = {"stage": settings["stage"]}
    if options.bucket is not None:
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
    config = configuration(options)
    if "tensor" in options.settings:
        config["tensor_parallel"] = {"autotp_size": options.settings["tensor"]}
    if "sequence" in options.settings:
        config["sequence_parallel_size"] = options.settings["sequence"]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, lr_scheduler=options.scheduler and options.scheduler
    )
    return engine


def forward_backward(engine, batch, last=True, mode="train"):
    with torch.set_grad_enabled(mode != "evaluate"):
        engine.train(mode != "evaluate")
        loss = engine(*batch)
        engine.train()
    if mode == "train":
        engine.backward(loss)
        if not last:
            engine.step()  # DeepSpeed counts the passes, and updates after the last of them
    return loss


def step(engine):
    engine.step()


def whole_weights(engine):
    from deepspeed.utils import safe_get_full_fp32_param

    parameters = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=engine.zero_optimization_stage() == 3):
        plain = {name: parameter.detach().float().clone() for name, parameter in parameters.items()}
    if next(iter(parameters.values())).dtype == torch.float32:
        return plain
    masters = {name: safe_get_full_fp32_param(parameter) for name, parameter in parameters.items()}
    return plain | {name: master for name, master in masters.items() if master is not None}


def gradient_norm(engine):
    return engine.get_global_grad_norm()


def save(engine, folder):
    engine.save_checkpoint(folder, tag="conform")


def load(engine, folder, weights_only=False):
    engine.load_checkpoint(
        folder, tag="conform", load_module_only=weights_only, load_optimizer_states=not weights_only
    )
