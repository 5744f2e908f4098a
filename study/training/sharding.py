"""FSDP2 through Accelerate: which modules are units."""

from accelerate import Accelerator
from transformers import PreTrainedModel


def name_layers(accelerator: Accelerator, model: PreTrainedModel) -> None:
    """Name the layers of a model as Accelerate's units, without a module that holds the input embeddings.

    Accelerate 1.15 makes units of all classes in `_no_split_modules`, and then one of the input embeddings. BERT, ViT
    and ModernBERT have their embeddings among those classes, and end in a TypeError, because the same parameters are
    then sharded twice (`reproductions/fsdp2_cannot_shard_bert.py`).
    """
    embeddings = model.get_input_embeddings()
    holders = {type(module).__name__ for module in model.modules() if embeddings in module.modules()}
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = sorted(set(model._no_split_modules or ()) - holders)
