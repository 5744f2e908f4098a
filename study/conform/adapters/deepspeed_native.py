"""DeepSpeed by its own interface.

Settings: stage, offload (cpu or nvme), hpz, tensor (AutoTP), sequence (Ulysses), tiles (TiledMLP), torch_backward
(loss.backward() instead of the engine's), and config: more of DeepSpeed's own settings.
"""

import contextlib
import functools
import logging
import os

logging.disable(logging.WARNING)
os.environ.update(DS_ACCELERATOR="cpu", TORCHDYNAMO_DISABLE="1")  # nothing here is compiled

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import lr_schedules

get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)  # here once, and not in each rank
getattr(deepspeed.ops, "__compatible_ops__", None)  # some releases compile a test program for it
with contextlib.suppress(ImportError):
    import deepspeed.module_inject.auto_ep_layer


def build(model, optimizer, options):
    if "sequence" in options.settings:
        raise NotImplementedError("Ulysses replaces the attention of a transformer, and these models have none")
    if options.settings.get("offload") == "nvme":
        raise NotImplementedError("DeepSpeed keeps parts below 1 MiB in memory, and these models are smaller")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": options.passes,
        "gradient_clipping": options.clip,  # 0 switches it off: the default changed to 1
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero_section(options),
        "bf16": {"enabled": options.precision.startswith("bf16")},
        "fp16": {"enabled": options.precision == "fp16"},
    }
    if options.precision == "bf16_pure":
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if options.precision == "autocast":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    if "tensor" in options.settings:
        config["tensor_parallel"] = {"autotp_size": options.settings["tensor"]}
    for block in model.blocks if "tiles" in options.settings else []:
        block.forward = functools.partial(tiled, block, options.settings["tiles"])
    config = merged(config, options.settings.get("config", {}))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=options.scheduler)
    engine.backward = torch.Tensor.backward if "torch_backward" in options.settings else engine.backward
    return engine


def merged(config, more):
    return (
        config | {key: merged(config[key], value) if key in config else value for key, value in more.items()}
        if isinstance(more, dict)
        else more
    )


def tiled(block, tiles, hidden):
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    def linear(module, rows):
        return torch.nn.functional.linear(rows, module.weight, module.bias)

    return TiledMLP.apply(linear, block, hidden, tiles, list(block.parameters()))


def schedule(optimizer, name, rate):
    if name == "warmup":
        return lr_schedules.WarmupLR(optimizer, warmup_num_steps=2, warmup_type="linear")
    if name == "cosine":
        return lr_schedules.WarmupCosineLR(optimizer, 10, warmup_num_steps=2, warmup_type="linear")
    return lr_schedules.OneCycle(optimizer, rate / 5, rate, cycle_first_step_size=4, cycle_first_stair_count=2)


def zero_section(options):
    section = {"stage": options.settings["stage"]}
    if options.bucket:
        section |= {"reduce_bucket_size": options.bucket, "allgather_bucket_size": options.bucket}
    if options.settings["stage"] == 3:
        section |= {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
        section |= {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    if "hpz" in options.settings:
        section["zero_hpz_partition_size"] = options.settings["hpz"]
    if "offload" in options.settings:
        place = {"device": options.settings["offload"], "pin_memory": False}
        section["offload_optimizer"] = place
        if options.settings["stage"] == 3:
            section["offload_param"] = place
    return section


def forward_backward(engine, batch, last=True, mode="train"):
    engine.train(mode != "evaluate")
    with torch.set_grad_enabled(mode != "evaluate"):
        loss = engine(*batch)
    if mode == "train":
        counts = engine.gradient_accumulation_steps() > 1
        if not counts:
            engine.set_gradient_accumulation_boundary(last)
        engine.backward(loss)
        if counts and not last:
            engine.step()  # DeepSpeed counts the passes, and updates after the last of them
    return loss


def step(engine):
    engine.step()


def whole_weights(engine):
    parameters = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=engine.zero_optimization_stage() == 3):
        plain = {name: parameter.detach().float().clone() for name, parameter in parameters.items()}
    if next(iter(parameters.values())).dtype == torch.float32:
        return plain
    if hasattr(engine.optimizer, "fp32_groups"):  # stage 0
        groups = zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True)
        masters = {half: full for halves, fulls in groups for half, full in zip(halves, fulls, strict=True)}
        return {name: masters.get(parameter, plain[name]) for name, parameter in parameters.items()}
    masters = {name: deepspeed.utils.safe_get_full_fp32_param(parameter) for name, parameter in parameters.items()}
    return plain | {name: master for name, master in masters.items() if master is not None}


def gradient_norm(engine):
    return engine.get_global_grad_norm()


def save(engine, folder):
    engine.save_checkpoint(folder, tag="conform")


def load(engine, folder, weights_only=False):
    only = {"load_module_only": weights_only, "load_optimizer_states": not weights_only}
    engine.load_checkpoint(folder, tag="conform", **only)
