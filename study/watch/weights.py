"""Which weights a training may change, and which it has changed: each tensor's sum at the beginning and at the end."""

import math

import torch

from study.measure import roles


class Weights:
    """The parameters of a model, as they were when the watch began."""

    def __init__(self, model):
        self._parameters = list(model.parameters())
        self._counts = [getattr(each, "ds_numel", each.numel()) for each in self._parameters]
        self._total = sum(self._counts)
        self._sums = self._sum()

    @property
    def trained_share(self) -> float:
        """Return the share of parameters that have requires_grad now."""
        pairs = zip(self._counts, self._parameters, strict=True)
        return sum(count for count, parameter in pairs if parameter.requires_grad) / self._total

    def unchanged(self) -> tuple[int, float]:
        """Return how many parameters should train and are what they were, and the sum of all weights of this rank."""
        now = self._sum()
        same = 0
        for parameter, count, before, after in zip(self._parameters, self._counts, self._sums, now, strict=True):
            if parameter.requires_grad and before == after:  # one that is not finite is not equal
                same += count
        return same, math.fsum(value for value in now if math.isfinite(value))

    @torch.no_grad()
    def _sum(self) -> list[float]:
        """Return the sum of this rank's part of each parameter. NaN if it is frozen, or elsewhere."""
        sums = []
        for parameter in self._parameters:
            part = getattr(parameter, "ds_tensor", getattr(parameter, "_local_tensor", parameter))
            value = math.nan
            # Frozen weights may be in 4 bits, of which torch has no sum, and mps has no float64.
            is_here = not str(getattr(part, "status", "")).endswith("NOT_AVAILABLE")  # on stage 3's disk
            if parameter.requires_grad and is_here and part.numel() and part.device.type in ("cpu", "cuda"):
                value = float(part.sum(dtype=torch.float64))  # one element of many millions counts
            sums.append(value)
        return sums


def tie_is_lost(model) -> bool:
    """Return whether a model of transformers should share its first and last weights, and has two of them."""
    plain = roles.plain_model(model)
    if not getattr(getattr(plain, "config", None), "tie_word_embeddings", False):
        return False
    try:
        first, last = (getattr(plain, f"get_{side}_embeddings", lambda: None)() for side in ("input", "output"))
    except NotImplementedError:  # a model of one's own does not say which they are
        return False
    if first is None or last is None or not plain._tied_weights_keys:
        return False
    return first.weight is not last.weight
