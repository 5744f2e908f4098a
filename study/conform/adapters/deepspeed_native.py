"""DeepSpeed by its own interface. Settings: stage, and zero: more of zero_optimization."""

from study.conform.adapters.deepspeed_common import configuration, deepspeed, full_weights, parts  # isort: skip

import torch


def build(model, optimizer, options):
    config = configuration(options)
    config["zero_force_ds_cpu_optimizer"] = False  # offloading would demand DeepSpeed's own Adam
    if options.precision == "bf16_pure":
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=options.scheduler)
    return engine


def forward_backward(engine, batch, last=True, mode="train"):
    engine.train(mode != "evaluate")
    with torch.set_grad_enabled(mode != "evaluate"):
        loss = engine(*batch)
    if mode == "train":
        # Told of several passes, DeepSpeed counts them, and updates after the last. Otherwise it is told which is last.
        counts = engine.gradient_accumulation_steps() > 1
        if not counts:
            engine.set_gradient_accumulation_boundary(last)
        engine.backward(loss)
        if counts and not last:
            engine.step()
    return loss


def step(engine):
    engine.step()
    return engine.get_global_grad_norm()


def whole_weights(engine):
    return full_weights(engine.module)


def save(engine, folder):
    engine.save_checkpoint(folder, tag="conform")


def load(engine, folder, weights_only=False):
    engine.load_checkpoint(folder, tag="conform", **parts(weights_only))
