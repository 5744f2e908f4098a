"""Writes the tape of a pass: what it makes and frees, its kernels, and where in the model it is."""

import itertools
import weakref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import study.core.models.on_cuda  # noqa: F401 it registers fused attention
from study.core.models.values import GROUPED
from study.predict.trace.tape import Tape

aten = torch.ops.aten
ours = torch.ops.study


def _attention(query, key, value, *_, **__) -> int:
    """Scores, and their products with the values. PyTorch's formula refuses heads that share keys before 2.12."""
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(_, query, key, value, *__, **___) -> int:
    # Five products of as many scores. Three are as wide as queries: the scores again, the gradients of queries and of
    # keys. Two are as wide as values: their gradient, and that of the scores (torch/utils/flop_counter.py,
    # sdpa_backward_flop_count).
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


PRODUCTS = flop_registry | GROUPED  # the formulas of their operations
PRODUCTS |= {aten._scaled_dot_product_flash_attention_for_cpu: _attention, ours.fused_attention: _attention}
PRODUCTS |= dict.fromkeys(
    (aten._scaled_dot_product_flash_attention_for_cpu_backward, ours.fused_attention_backward), _attention_backward
)
NO_KERNEL = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten._unsafe_view}
MATRICES = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}  # where their two factors begin in the arguments


class Recorder(TorchDispatchMode):
    """Writes a tape: every tensor that the passes make, every kernel, and the operations of matrix products."""

    def __init__(self, known: list[torch.Tensor], has_types: bool):
        super().__init__()
        self._has_types = has_types  # products say the bytes of an element
        self.tape: Tape = []
        self._count = itertools.count()
        self._numbers: dict[int, int] = {}  # of the storages that a pass makes
        # Storages of the model and of its inputs, and references to those that a pass makes.
        self._live: dict[int, object] = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in known}

    def follow(self, model: nn.Module) -> None:
        """Note when the forward pass reaches a tensor, and when a gradient is complete; then drop the gradient."""
        names = {tensor: name for name, tensor in model.named_parameters()}
        unused = dict(names)

        def reaches(module: nn.Module, _) -> None:
            # A layer that runs again in the backward pass has been reached before.
            for tensor in module.parameters(recurse=False):
                if name := unused.pop(tensor, None):
                    self.tape.append(("event", f"use {name}", 0))

        def complete(tensor) -> None:
            # An engine would take the gradient now. The trace keeps none, so that activations are all that it holds.
            storage = tensor.grad.untyped_storage()
            self.tape.append(("event", f"gradient {names[tensor]}", storage.nbytes()))
            self.tape.append(("gradient", self._numbers[id(storage)]))
            tensor.grad = None

        for module in model.modules():
            module.register_forward_pre_hook(reaches)
        for tensor in names:
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(complete)

    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        if function is torch.ops.prim.device.default:  # three of five calls, most of them autograd's
            self.tape.append(("kernel", None, 0))
            return args[0].device
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        # Before the kernel is noted: while it runs, its inputs and its outputs are held.
        for tensor in tensors_in(out):
            self._add(tensor)
        packet = function._overloadpacket
        flops = PRODUCTS.get(packet, lambda *_, **__: 0)(*args, **kwargs, out_val=out)
        kernel = None
        if not (function.is_view or function.namespace == "prim" or packet in NO_KERNEL):
            kernel = _kernel(packet, args, out, flops, self._has_types)
        self.tape.append(("kernel", kernel, flops))
        return out

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._live:
            return
        number = self._numbers[key] = next(self._count)
        self.tape.append(("made", storage.nbytes(), in_backward()))

        def gone(_) -> None:
            # Python may give this id to the next storage.
            del self._live[key]
            self.tape.append(("freed", number))

        self._live[key] = weakref.ref(storage, gone)


def in_backward() -> bool:
    """Whether autograd runs a graph now: also where a layer is computed again."""
    return torch._C._current_graph_task_id() != -1


def tensors_in(values) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _kernel(packet, args: tuple, out, flops: int, has_types: bool) -> tuple[str, tuple[int, ...]]:
    """Return a kernel's kind and sizes: "product", (count, m, n, k); "attention", (operations,); "other", (bytes,).

    With `has_types`, a product has the bytes of its factors' elements as its last size.
    """
    if packet in MATRICES:
        left, right = args[MATRICES[packet] :][:2]
        sizes = (left.shape[:-2].numel(), left.shape[-2], right.shape[-1], left.shape[-1])
        return "product", (*sizes, left.element_size()) if has_types else sizes
    if flops and "attention" in packet.__name__:
        return "attention", (flops,)
    if flops:  # such as a convolution
        # A product of matrices with as many operations, 2 m n k, stands for it.
        return "product", (1, max(1, flops // (2 * 1024 * 1024)), 1024, 1024)
    # Bytes read and written. An expanded tensor, such as a bias, has fewer than its shape.
    moved = [min(each.nbytes, each.untyped_storage().nbytes()) for each in tensors_in((args, out))]
    return "other", (sum(moved),)
