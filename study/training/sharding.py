"""FSDP2 through Accelerate: which modules are units, and the master copy of bf16 weights in parts."""

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from study.training.models import MasterAdamW


def name_layers(accelerator: Accelerator, model: PreTrainedModel) -> None:
    """Name the layers of a model as Accelerate's units, without a module that holds the input embeddings.

    Accelerate 1.15 makes units of all classes in `_no_split_modules`, and then one of the input embeddings. BERT, ViT
    and ModernBERT have their embeddings among those classes, and end in a TypeError, because the same parameters are
    then sharded twice (`reproductions/fsdp2_cannot_shard_bert.py`).
    """
    embeddings = model.get_input_embeddings()
    holders = {type(module).__name__ for module in model.modules() if embeddings in module.modules()}
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = sorted(set(model._no_split_modules or ()) - holders)


def with_master(optimizer, model: torch.nn.Module, settings: dict) -> None:
    """Update bf16 weights by way of fp32 master copies: of the parts that a rank holds, which `prepare` has made.

    Accelerate looks for the model's own parameters in the optimizer, so it prepares another one first.
    """
    optimizer.optimizer = MasterAdamW(model.parameters(), **settings)
