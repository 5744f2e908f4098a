"""The functions by which `study conform` holds one of the five files to one process. They import nothing of the study.

    ZERO_BY_HAND=stage2 study conform examples/zero_by_hand/adapter.py

Without the variable it is stage3.
"""

import importlib
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))


def build(model, optimizer, options):
    if options.clip or options.curve or options.precision != "fp32":
        raise NotImplementedError("no clipping, no schedule, fp32 only")
    if model.is_sparse:
        raise NotImplementedError("gradients are dense")
    if model.may_leave_some or not all(each.requires_grad for each in model.parameters()):
        raise NotImplementedError("every parameter is trained in every micro-batch")
    file = options.settings.get("file") or os.environ.get("ZERO_BY_HAND", "stage3")
    kind = getattr(importlib.import_module(file), file.title().replace("_", ""))
    return kind(model, optimizer, options.passes)


def forward_backward(trainer, batch, last=True, mode="train"):
    if mode == "train":
        return trainer.forward_backward(*batch)
    with torch.no_grad():
        return trainer.model(*batch)


def step(trainer):
    trainer.step()  # nothing is clipped, so there is no norm to return


def whole_weights(trainer):
    if type(trainer).__name__ == "Stage3":
        for weight in trainer.part:
            trainer.gather(weight)
    return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
