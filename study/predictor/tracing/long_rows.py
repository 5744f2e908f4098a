"""Lower the memory of passes over long rows: feed-forward layers in tiles, and checkpoints on the host.

Both come from Arctic Long Sequence Training (arXiv 2506.13996). Only shapes are traced: nothing is copied.
"""

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from study.errors import Stop
from study.predictor.tracing.transformer import HOST_CHECKPOINTS, TILED_MLP

IS_LAST = "ds_grad_is_ready"  # DeepSpeed's mark on a tensor: no further tile adds to its gradient


class _Tiled(torch.autograd.Function):
    """DeepSpeed's TiledMLP (runtime/sequence_parallel/ulysses_sp.py, 0.19.8): only its input is kept."""

    @staticmethod
    def forward(ctx, layer, forward, place, rows):
        ctx.save_for_backward(rows)
        ctx.tiles = math.ceil(rows.shape[-2] / rows.shape[-1])
        ctx.rest = layer, forward, place
        with torch.no_grad():
            return torch.cat([forward(tile) for tile in rows.chunk(ctx.tiles, dim=-2)], dim=-2)

    @staticmethod
    def backward(ctx, gradient):
        layer, forward, place = ctx.rest
        (rows,) = ctx.saved_tensors
        flat = rows.detach().reshape(-1, rows.shape[-1])
        rows_gradient = torch.zeros_like(flat)
        parts = [tensor.chunk(ctx.tiles) for tensor in (flat, gradient.reshape(flat.shape), rows_gradient)]
        for number, (tile, output_gradient, tile_gradient) in enumerate(zip(*parts, strict=True), 1):
            for tensor in layer.parameters():
                setattr(tensor, IS_LAST, number == len(parts[0]))
            tile.requires_grad_()
            tile.grad = tile_gradient
            with torch.enable_grad(), place():  # backward() puts function modes aside
                out = forward(tile)
            torch.autograd.backward(out, output_gradient)
        return None, None, None, rows_gradient.view(rows.shape)


def keep_less(model: nn.Module, names: tuple[str, ...], place: Callable[[], AbstractContextManager]) -> None:
    """Apply the named methods to a model: HOST_CHECKPOINTS, TILED_MLP, or both."""
    if HOST_CHECKPOINTS in names:
        _keep_on_host(model)
    if TILED_MLP in names:
        _tile(model, place)


def _tile(model: nn.Module, place: Callable[[], AbstractContextManager]) -> None:
    """Make the feed-forward layers compute a few tokens at a time, and recompute them in the backward pass."""
    layers = [module for module in model.modules() if type(module).__name__.endswith("MLP")]
    if not layers:
        raise Stop("this model has no feed-forward layers with a name that ends in MLP", "leave --tiled-mlp out")
    for layer in layers:
        vars(layer)["forward"] = functools.partial(_Tiled.apply, layer, layer.forward, place)


def _keep_on_host(model: nn.Module) -> None:
    """Keep the input of each checkpointed layer in host memory. The backward pass fetches it.

    This is transformers' own offload=True (5.23, modeling_utils.py): copies to the host around each checkpoint.
    """
    layers = [module for module in model.modules() if hasattr(module, "_gradient_checkpointing_func")]
    if not layers:
        raise Stop("without recomputation there are no checkpoints to keep on the host", "give --checkpointing")
    for layer in layers:
        vars(layer)["_gradient_checkpointing_func"] = _on_host(vars(layer)["_gradient_checkpointing_func"])


def _on_host(checkpoint: Callable) -> Callable:
    def with_hooks(*args):
        with saved_tensors_hooks(lambda tensor: (tensor.shape, tensor.dtype), _fetched):
            return checkpoint(*args)

    return with_hooks


def _fetched(kept: tuple[torch.Size, torch.dtype]) -> torch.Tensor:
    return torch.empty(kept[0], dtype=kept[1])
