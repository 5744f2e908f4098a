"""Finds the layers of a model that are alike, and leaves some of them out.

A layer's kind is everything that it is made of. Its surroundings are its own kind, the kinds of its two neighbours, and
whether it is at an end: the first of its kind, where the backward pass ends for tensors that a kind shares, or one of
the last two, where the backward pass begins. Layers with the same surroundings do the same in a pass, so a few of them
stand for all.
"""

import copy
from collections import Counter

import torch
from torch import nn

from study.predict.trace.repeating import Stack, surroundings

NUMBERS = ("layer_idx", "layer_id", "layer_index")  # attributes that may differ: a layer's place in its stack
CONSTANTS = (int, float, str, bool, tuple, list, torch.dtype, type(None))


def shorten(model: nn.Module) -> list[Stack]:
    """Remove the layers that others stand for. The rest keep their names. Returns the shortened stacks."""
    stacks: list[Stack] = []
    parts = dict(model.named_modules())
    for name, layers in parts.items():
        is_inside = any(name.startswith(f"{stack.name}.") for stack in stacks)
        if is_inside or not isinstance(layers, nn.ModuleList) or not len(layers):
            continue
        kinds = _kinds(layers)
        stack = Stack(name, kinds, _enough(kinds))
        if len(stack.kept) < len(kinds):
            stacks.append(stack)
            for place in set(range(len(kinds))) - set(stack.kept):
                del layers._modules[str(place)]
            _shorten_config(parts[name.rpartition(".")[0]], stack)
    return stacks


def _shorten_config(parent: nn.Module, stack: Stack) -> None:
    """Shorten lists with a value for each layer, such as layer_types: layers index them by their place in the stack."""
    config = copy.copy(vars(parent).get("config"))
    if config is None:
        return
    vars(parent)["config"] = config
    for key, value in vars(config).items():
        if isinstance(value, list) and len(value) == len(stack.kinds):
            vars(config)[key] = [value[place] for place in stack.kept]


def _kinds(layers: nn.ModuleList) -> tuple[int, ...]:
    numbers: dict[tuple, int] = {}
    shared = Counter(id(tensor) for layer in layers for tensor in layer.parameters())
    kinds = []
    for place, layer in enumerate(layers):
        alone = all(shared[id(tensor)] == 1 for tensor in layer.parameters())
        kind = _kind(layer) if alone else (place,)  # a layer that shares tensors with others is like no other
        kinds.append(numbers.setdefault(kind, len(numbers)))
    return tuple(kinds)


def _kind(layer: nn.Module) -> tuple:
    """Types, tensors and constants of a layer and of all its parts."""
    parts = []
    for name, module in layer.named_modules():
        named = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        tensors = [(key, t.shape, t.dtype, t.requires_grad) for key, t in named]
        constants = [
            (key, value) for key, value in vars(module).items() if isinstance(value, CONSTANTS) and key not in NUMBERS
        ]
        parts.append((name, type(module), tuple(tensors), repr(constants)))
    return tuple(parts)


def _enough(kinds: tuple[int, ...]) -> tuple[int, ...]:
    """Places of the layers to keep: one for each kind of surroundings, two if several layers have them, and no others.

    Two, so that the passes over both can be compared.
    """
    needed = {key: min(2, count) for key, count in Counter(surroundings(kinds)).items()}
    kept = tuple(range(len(kinds)))
    length = len(kinds) - 1
    while length > 0:  # the longest run of layers that can be left out, then the next
        for start in range(1, len(kept) - length):
            fewer = kept[:start] + kept[start + length :]
            counts = Counter(surroundings(tuple(kinds[place] for place in fewer)))
            if counts.keys() == needed.keys() and all(counts[key] >= least for key, least in needed.items()):
                kept = fewer
                break
        else:
            length -= 1
    return kept
