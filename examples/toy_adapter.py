"""The adapter of the toy library for `study conform`. It imports nothing of the study."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from toy_sharding import Sharded


def build(model, optimizer, options):
    if options.precision != "fp32":
        raise NotImplementedError("the toy library has fp32 only")
    if options.scheduler:
        raise NotImplementedError("the toy library has no schedules")
    return Sharded(model, optimizer, options.passes, options.clip)


def forward_backward(trainer, batch, last=True, mode="train"):
    if mode == "train":
        return trainer.forward_backward(*batch)
    with torch.no_grad():
        return trainer.model(*batch)


def step(trainer):
    trainer.step()


def whole_weights(trainer):
    return dict(trainer.model.named_parameters())


def gradient_norm(trainer):
    return trainer.norm
