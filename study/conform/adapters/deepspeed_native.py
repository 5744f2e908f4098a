"""DeepSpeed by its own interface.

Settings: stage, offload (cpu or nvme), hpz, tensor (AutoTP), sequence (Ulysses), and config: more of DeepSpeed's
own settings.
"""

from study.conform.adapters.deepspeed_common import configuration, deepspeed, full_weights  # isort: skip

import torch


def build(model, optimizer, options):
    if "sequence" in options.settings:
        raise NotImplementedError("Ulysses replaces the attention of a transformer, and these models have none")
    if options.settings.get("offload") == "nvme":
        raise NotImplementedError("DeepSpeed keeps parts below 1 MiB in memory, and these models are smaller")
    config = configuration(options)
    config |= {"zero_force_ds_cpu_optimizer": False, "fp16": {"enabled": options.precision == "fp16"}}
    if options.precision == "bf16_pure":
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if "tensor" in options.settings:
        config["tensor_parallel"] = {"autotp_size": options.settings["tensor"]}
    config = merged(config, options.settings.get("config", {}))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=options.scheduler)
    return engine


def merged(config, more):
    return (
        config | {key: merged(config[key], value) if key in config else value for key, value in more.items()}
        if isinstance(more, dict)
        else more
    )


def schedule(optimizer, name, rate):
    schedules = deepspeed.runtime.lr_schedules
    if name == "warmup":
        return schedules.WarmupLR(optimizer, warmup_num_steps=2, warmup_type="linear")
    if name == "cosine":
        return schedules.WarmupCosineLR(optimizer, 10, warmup_num_steps=2, warmup_type="linear")
    return schedules.OneCycle(optimizer, rate / 5, rate, cycle_first_step_size=4, cycle_first_stair_count=2)


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
    return full_weights(engine.module)


def gradient_norm(engine):
    return engine.get_global_grad_norm()


def save(engine, folder):
    engine.save_checkpoint(folder, tag="conform")


def load(engine, folder, weights_only=False):
    only = {"load_module_only": weights_only, "load_optimizer_states": not weights_only}
    engine.load_checkpoint(folder, tag="conform", **only)
