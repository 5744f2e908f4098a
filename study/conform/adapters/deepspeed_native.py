"""DeepSpeed by its own interface. Settings: stage, and zero: more of zero_optimization."""

from study.conform.adapters.deepspeed_common import configuration, deepspeed, full_weights, parts  # isort: skip

import torch

LINEAR = {"warmup_num_steps": 2, "warmup_type": "linear"}
own = deepspeed.runtime.lr_schedules
schedules = {
    "warmup": lambda optimizer: own.WarmupLR(optimizer, **LINEAR),
    "cosine": lambda optimizer: own.WarmupCosineLR(optimizer, 10, **LINEAR),
    "stairs": lambda optimizer: own.OneCycle(
        optimizer, 0.004, 0.02, cycle_first_step_size=4, cycle_first_stair_count=2
    ),
}


def build(model, optimizer, options):
    if model.is_sparse:
        raise NotImplementedError("ZeRO has no sparse gradients, and `sparse_gradients` of stage 0 is not set here")
    config = configuration(options)
    config["zero_force_ds_cpu_optimizer"] = False  # offloading would demand DeepSpeed's own Adam
    if options.precision == "bf16_pure":
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    given = {"optimizer": optimizer}
    if options.optimizer == "muon":  # DeepSpeed's own, which its engines know, in bf16 as PyTorch's
        config["optimizer"] = {"type": "Muon", "params": {"lr": optimizer.defaults["lr"], "ns_method": "standard"}}
        config["zero_optimization"]["reduce_scatter"] = False  # stage 3 refuses it
        given = {"model_parameters": model.parameters()}
    if "init" in options.settings:
        deepspeed.zero.Init(model, config_dict_or_path=config)
    scheduler = None  # the rate stays as it is
    if options.curve:
        scheduler = schedules.get(options.curve, options.schedule)
    engine, *_ = deepspeed.initialize(model=model, config=config, lr_scheduler=scheduler, **given)
    return engine


def forward_backward(engine, batch, last=True, mode="train"):
    engine.train(mode != "evaluate")
    with torch.set_grad_enabled(mode != "evaluate"):
        loss = engine(*batch)
        if mode == "inner":
            loss = (loss + inner(engine)(*batch)) / 2
    if mode in ("train", "inner"):
        # Told of several passes, DeepSpeed counts them, and updates after the last. Otherwise it is told which is last.
        counts = engine.gradient_accumulation_steps() > 1
        if not counts:
            engine.set_gradient_accumulation_boundary(last)
        engine.backward(loss)
        if counts and not last:
            engine.step()
    return loss


def inner(engine):
    return engine.module


def step(engine):
    engine.step()
    return engine.get_global_grad_norm()


def loss_scale(engine):
    return engine.optimizer.loss_scale


def whole_weights(engine):
    return full_weights(engine.module)


def save(engine, folder):
    engine.save_checkpoint(folder, tag="conform")


def load(engine, folder, weights_only=False):
    engine.load_checkpoint(folder, tag="conform", **parts(weights_only))
