"""Builds the model of a config, with values or with shapes alone."""

import copy

import torch
from transformers import PretrainedConfig, PreTrainedModel

from study.models.config import class_for


def build(
    config: PretrainedConfig,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    checkpointing: bool = False,
) -> PreTrainedModel:
    """A model in training mode with new random weights, built on its device.

    On `meta`, its tensors have shapes but no values. The config is copied, because building changes it.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = class_for(config)(copy.deepcopy(config))
    finally:
        torch.set_default_dtype(before)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()
