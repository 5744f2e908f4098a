"""Which data sets a loop trains and evaluates on, and whether epochs begin alike."""

import contextlib
import hashlib
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

READ_ELEMENTS = 4096  # of each input
BEGINNING = 4  # batches: few rows may begin alike by chance


def digest(tensors: list[torch.Tensor]) -> str:
    """Return the shapes of inputs, and a digest of their first elements."""
    shapes = " ".join("x".join(map(str, tensor.shape)) for tensor in tensors)
    with contextlib.suppress(RuntimeError, TypeError):  # a sparse tensor, or one without memory
        first = [tensor.detach().reshape(-1)[:READ_ELEMENTS].tolist() for tensor in tensors]
        return f"{shapes} {hashlib.sha256(repr(first).encode()).hexdigest()[:12]}"
    return shapes


class Loaders:
    """What the loaders of PyTorch gave to a loop. Accelerate's and the Trainer's are made of them."""

    def __init__(self) -> None:
        self.orders_repeated = 0  # epochs that began with the batches of an earlier one
        self.evaluated_on_trained = False
        self._trained: set[Any] = set()  # data sets
        self._kept: dict[Any, Any] = {}  # so that no other data set gets the id
        self._last: tuple[Any, bool] | None = None  # data set of the last batch, and whether the loop trained then
        self._beginning: list[str] = []
        self._orders: set[tuple[Any, ...]] = set()

    def fetched(self, iterator: Any, batch: Any, trains: bool) -> None:
        """Note a batch. `trains`: whether the model is in training mode, with gradients, as it is fetched."""
        data = iterator._dataset
        key = getattr(data, "_fingerprint", id(data))  # the Trainer makes an equal copy of a data set of `datasets`
        self._last = key, trains
        self._kept[key] = data
        number = iterator._num_yielded
        if not trains or number > BEGINNING:
            return
        if number == 1:
            self._beginning = []
        tensors = [leaf for leaf in tree_leaves(batch) if torch.is_tensor(leaf) and leaf.ndim and leaf.is_cpu]
        self._beginning.append(digest(tensors[:1]))
        if number == len(self._beginning) == BEGINNING and tensors:
            order = key, *self._beginning
            self.orders_repeated += order in self._orders
            self._orders.add(order)

    def ran(self, trains: bool, has_gradients: bool) -> None:
        """Note a forward pass. Only what was fetched in its own mode is its batch: Accelerate fetches one ahead."""
        if self._last is None:
            return
        key, was_training = self._last
        if trains and was_training:
            self._trained.add(key)
        elif not has_gradients and not was_training:
            self.evaluated_on_trained |= key in self._trained
