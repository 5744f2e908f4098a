"""DeepSpeed's pipeline: each rank has some of the layers, and all rows pass through all ranks. Plain models only."""

from study.conform.adapters.deepspeed_common import deepspeed  # isort: skip

from types import SimpleNamespace

import torch
import torch.distributed as dist


class Residual(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, hidden):
        return hidden + torch.tanh(self.block(hidden))


def build(model, optimizer, options):
    if type(model).__name__ != "Plain" or options.precision != "fp32" or len(optimizer.param_groups) > 1:
        raise NotImplementedError("this adapter has plain models in fp32 with one group")
    deepspeed.init_distributed("gloo")
    names = {parameter: name for name, parameter in model.named_parameters()}
    layers = [model.first, torch.tanh, *(Residual(block) for block in model.blocks), model.last]
    mean = torch.nn.functional.mse_loss
    pipeline = deepspeed.PipelineModule(
        layers, num_stages=dist.get_world_size(), loss_fn=mean, partition_method="uniform"
    )
    mine = {names[parameter]: parameter for parameter in pipeline.parameters()}
    optimizer.param_groups[0]["params"] = list(mine.values())
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": options.passes * dist.get_world_size(),
        "gradient_clipping": options.clip,
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=pipeline, optimizer=optimizer, config=config, lr_scheduler=options.scheduler
    )
    return SimpleNamespace(engine=engine, mine=mine, batches=[], passes=options.passes)


def forward_backward(trainer, batch, last=True, mode="train"):
    if mode != "train":
        raise NotImplementedError("a pipeline trains a whole update at once")
    batches = [None] * dist.get_world_size()
    dist.all_gather_object(batches, batch)
    trainer.batches += batches
    if not last:
        return 0.0
    loss = trainer.engine.train_batch(iter(trainer.batches))
    trainer.batches.clear()
    return float(loss) * trainer.passes  # the mean over all passes


def step(trainer):
    """Nothing: train_batch has done it."""


def whole_weights(trainer):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, {name: weight.detach().clone() for name, weight in trainer.mine.items()})
    return {name: weight for part in parts for name, weight in part.items()}
