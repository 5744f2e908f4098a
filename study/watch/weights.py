"""Which weights a training may change, and which it has changed: each tensor's sum at the beginning and at the end."""

import math
from typing import Any

import torch

from study.measure import roles
from study.records.sections import Watched

FEWEST_UNITS = 4
SHOWN = 3
EDGE = 0.95  # of the largest weight that a layer of torch begins with


class Weights:
    """The parameters of a model, as they were when the watch began."""

    def __init__(self, model):
        self._model = model
        self._named = dict(model.named_parameters())
        self._parameters = list(self._named.values())
        self._head = head_of(model)
        self._counts = [getattr(each, "ds_numel", each.numel()) for each in self._parameters]
        self._total = sum(self._counts)
        self._sums = self._sum()

    @property
    def trained_share(self) -> float:
        """Return the share of parameters that have requires_grad now."""
        pairs = zip(self._counts, self._parameters, strict=True)
        return sum(count for count, parameter in pairs if parameter.requires_grad) / self._total

    def describe(self, watched: Watched) -> None:
        """Say whether the last layer trains, and alone, and whether what is frozen was ever trained."""
        frozen = [each for each in self._parameters if not each.requires_grad]
        watched.frozen_untrained = looks_untrained(frozen) if frozen else None
        watched.adapters_train = adapters_train(self._model)
        if self._head:
            watched.head, head = self._head
            watched.head_trains = any(each.requires_grad for each in head)
            others = {id(each) for each in self._parameters if each.requires_grad} - {id(each) for each in head}
            watched.head_alone_trains = watched.head_trains and not others

    @torch.no_grad()
    def alike(self) -> list[str]:
        """Return the names of some weights that train, are whole on this rank, and have equal rows."""
        found = []
        for name, each in self._named.items():
            is_whole = type(each) in (torch.nn.Parameter, torch.Tensor) and not hasattr(each, "ds_tensor")
            if each.requires_grad and is_whole and each.ndim > 1 and len(each) >= FEWEST_UNITS and each.any():
                found += [name] * bool((each == each[:1]).all())
        return found[:SHOWN]

    def describe_end(self, watched: Watched) -> float:
        """Say what should train and is what it was, and what trains by now. Return the sum of this rank's weights."""
        now = self._sum()
        rows = zip(self._named.items(), self._counts, self._sums, now, strict=True)
        # One that is not finite is not equal.
        same = {name: count for (name, each), count, before, after in rows if each.requires_grad and before == after}
        watched.unchanged_parameters = sum(same.values())
        watched.unchanged = sorted(same, key=lambda name: -same[name])[:SHOWN]
        if self._head:
            _, head = self._head
            is_same = {id(self._named[name]) for name in same}
            watched.head_unchanged = all(id(each) in is_same for each in head)
            watched.head_trains = watched.head_trains or any(each.requires_grad for each in head)  # unfrozen later
        watched.adapters_train = watched.adapters_train or adapters_train(self._model)
        return math.fsum(value for value in now if math.isfinite(value))

    @torch.no_grad()
    def _sum(self) -> list[float]:
        """Return the sum of this rank's part of each parameter. NaN if it is frozen, or elsewhere."""
        sums = []
        for parameter in self._parameters:
            part = roles.part_of(parameter)
            value = math.nan
            # Frozen weights may be in 4 bits, of which torch has no sum, and mps has no float64.
            is_here = not str(getattr(part, "status", "")).endswith("NOT_AVAILABLE")  # on stage 3's disk
            if parameter.requires_grad and is_here and part.numel() and part.device.type in ("cpu", "cuda"):
                value = float(part.sum(dtype=torch.float64))  # one element of many millions counts
            sums.append(value)
        return sums


def adapters_train(model) -> bool | None:
    """Return whether some weight of PEFT's layers trains. None without any, or if FSDP1 has made one tensor of all."""
    trains = []
    for layer in model.modules():
        # Copies of whole layers, as of a new head, are no adapters (peft 0.21.2, utils/other.py).
        for name in {*getattr(layer, "adapter_layer_names", ())} - {"modules_to_save"}:
            part = getattr(layer, name, None)
            weights = part.parameters() if isinstance(part, torch.nn.Module) else []
            trains += [each.requires_grad for each in weights]
    return any(trains) if trains else None


def embeddings_of(plain) -> tuple[Any, Any]:
    """Return the first and the last layer of a language model of transformers. None without one."""
    first, last = (getattr(plain, f"get_{side}_embeddings", lambda: None)() for side in ("input", "output"))
    return first, last


def tie_is_lost(model) -> bool:
    """Return whether a model of transformers should share its first and last weights, and has two of them."""
    plain = roles.plain_model(model)
    if not getattr(getattr(plain, "config", None), "tie_word_embeddings", False):
        return False
    try:
        first, last = embeddings_of(plain)
    except NotImplementedError:  # a model of one's own does not say which they are
        return False
    if first is None or last is None or not plain._tied_weights_keys:
        return False
    return first.weight is not last.weight


def head_of(model) -> tuple[str, list[torch.nn.Parameter]] | None:
    """Return the name and the weights of the last layer: the output embeddings, or the last module with weights."""
    if roles.fsdp_version(model) == 1:
        return None  # its weights are one flat tensor
    plain = roles.base_model(model)
    layers = {name: each for name, each in plain.named_modules() if list(each.parameters(recurse=False))}
    inputs, outputs = embeddings_of(plain)
    if outputs is not None and inputs is not None and not inputs.weight.requires_grad:
        return None  # whoever freezes the words freezes them at both ends
    for name, layer in reversed(layers.items()):
        if outputs is None or layer is outputs:
            return name, list(layer.parameters(recurse=False))
    return None


@torch.no_grad()
def looks_untrained(frozen: list[torch.nn.Parameter]) -> bool:
    """Return whether weights are as they were made: biases and norms of one number, or as torch's layers begin."""
    parts = [*map(roles.part_of, frozen)]
    vectors = [part for each, part in zip(frozen, parts, strict=True) if each.ndim == 1 and part.numel()]
    if vectors and all(bool((part == part[0]).all()) for part in vectors):
        return True
    matrix = max(parts, key=lambda part: part.numel() if part.ndim > 1 else 0)
    if matrix.ndim < 2 or not matrix.is_floating_point():
        return False
    largest = float(matrix.abs().max()) * matrix[0].numel() ** 0.5  # torch's are uniform, below 1 in this measure
    return EDGE < largest <= 1.0
