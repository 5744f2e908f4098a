"""Chooses the modules that are units of FSDP2 in Accelerate."""

from accelerate import Accelerator
from transformers import PreTrainedModel


def name_layers(accelerator: Accelerator, model: PreTrainedModel) -> None:
    """Make the layers of a model Accelerate's units, except modules that contain the input embeddings.

    Accelerate 1.15 makes a unit of each class in `_no_split_modules`, and another of the input embeddings. In BERT, ViT
    and ModernBERT those classes include the embeddings. Their parameters are then sharded twice, and PyTorch raises a
    TypeError (`reproductions/fsdp2_cannot_shard_bert.py`).
    """
    embeddings = model.get_input_embeddings()
    holders = {type(module).__name__ for module in model.modules() if embeddings in module.modules()}
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = sorted(set(model._no_split_modules or ()) - holders)
