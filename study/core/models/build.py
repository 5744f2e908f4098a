"""Builds the model of a config, with values or with shapes alone, and chooses the part of it that trains."""

import copy
import functools
import re
from collections.abc import Callable, Collection

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig, PreTrainedModel

from study.core.errors import Stop
from study.core.models.adapters import LINEAR, Adapted
from study.core.models.config import class_for


def build(
    config: PretrainedConfig,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Return a model in training mode with new random weights, built on its device.

    On `meta`, its tensors have shapes but no values. The config is copied, because building changes it.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = class_for(config)(copy.deepcopy(config))
    finally:
        torch.set_default_dtype(before)
    return model.train()


CLASSIFIERS = ("classifier", "score")  # transformers' names of heads with new random weights, which have to train


def freeze(
    model: PreTrainedModel,
    lora_rank: int | None = None,
    train_only: str | None = None,
    lora_targets: Collection[str] = (),
    dora: bool = False,
    drops: bool = False,
) -> None:
    """Freeze a model, except adapters and a classifier, and tensors with matching names.

    Adapters are at the linear layers with these names, without names at every one except the head.
    """
    if lora_rank is None and train_only is None:
        return
    for name, tensor in model.named_parameters():
        tensor.requires_grad_(lora_rank is not None and name.split(".")[0] in CLASSIFIERS)
    if lora_rank is not None:
        _add_adapters(model, lora_targets, functools.partial(Adapted, rank=lora_rank, dora=dora, drops=drops))
    try:
        trained = re.compile(train_only or "(?!)")  # without --train-only it matches nothing
    except re.error as error:
        raise Stop(f"--train-only {train_only!r} is no regular expression ({error})", "correct it") from None
    for name, tensor in model.named_parameters():
        if trained.search(name):
            tensor.requires_grad_(True)
    if not any(tensor.requires_grad for tensor in model.parameters()):
        raise Stop(f"no tensor of the model matches --train-only {train_only}", "give a part of a tensor's name")
    # Checkpointed layers need an input with a gradient, and frozen embeddings give none.
    model.enable_input_require_grads()


def _add_adapters(model: PreTrainedModel, targets: Collection[str], adapted: Callable) -> None:
    """Put an adapter beside frozen linear layers, by their names or at all except the output embeddings."""
    adapted_names = set()
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            wanted = name in targets if targets else child is not head
            if isinstance(child, LINEAR) and not child.weight.requires_grad and wanted:
                setattr(module, name, adapted(child))
                adapted_names.add(name)
    if missing := sorted({*targets} - adapted_names):
        raise Stop(f"the model has no linear layer named {' or '.join(missing)}", "name those of its layers")


aten = torch.ops.aten


class WithoutValues(TorchDispatchMode):
    """Inside a FakeTensorMode: reading a value gives 0, and grouped products work in every dtype.

    A value of 0 means no overflow, no norm to clip, no row without a mask. Mixtures of experts use grouped products.
    These have kernels for fp32, but PyTorch 2.13's own shape function only accepts bf16.
    """

    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        if function is aten._local_scalar_dense.default:
            return 0.0 if args[0].is_floating_point() else 0
        if function is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return _grouped_product(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _grouped_flops(left, right, *_, out_val, **__) -> int:
    """Each row of the left is multiplied with one group of the right; of two matrices, each column with a row."""
    products = left.shape[0] * right.shape[1] if left.dim() == right.dim() == 2 else out_val.numel()
    return 2 * products * left.shape[-1]


vars(_grouped_flops)["_get_raw"] = True  # FlopCounterMode's mark for a formula that takes tensors
GROUPED = {aten._grouped_mm: _grouped_flops}  # PyTorch 2.13's FlopCounterMode has no formula for it


def _grouped_product(left, right, offsets=None, bias=None, out_dtype=None) -> torch.Tensor:
    """Return the result's shape: one product for each group. Groups lie side by side, by rows or by columns."""
    shape = [left.shape[-2], right.shape[-1]]
    if left.dim() == right.dim() == 2:
        shape.insert(0, offsets.numel())
    elif left.dim() == right.dim() == 3:
        shape.insert(0, left.shape[0])
    return left.new_empty(shape, dtype=out_dtype or left.dtype)
