"""How long the sequences are that a rehearsal's peak rests on. The first batches of a data set are seldom its longest.

With --gpu, batches of tokens are lengthened to the data set's longest row, and with --tokens to so many.
"""

import weakref
from collections.abc import MutableMapping
from typing import Any

import torch

from study.rehearsal.request import Answer, Request


class Lengths:
    """Lengthens batches, and notes how long their sequences are."""

    def __init__(self, request: Request, answer: Answer):
        self.request = request
        self.answer = answer
        self._targets: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()
        # Of each loader, by names of the answer: what an evaluation reads is no part of an update.
        self._seen: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()

    def lengthen(self, loader: Any, batch: Any) -> Any:
        """Note the tokens of a batch's sequences, and repeat them until these are as long as wanted."""
        columns = batch if isinstance(batch, MutableMapping) else {"input_ids": batch}
        ids = columns.get("input_ids")
        if type(ids) is not torch.Tensor or ids.ndim != 2 or not ids.numel() or self.request.real:
            return batch
        if any(isinstance(each, torch.Tensor) and each.is_floating_point() for each in columns.values()):
            return batch
        rows = getattr(loader._index_sampler, "batch_size", None) or len(ids)
        joined = rows if len(ids) == 1 else 1  # a collator without padding puts all rows into one
        tokens = -(-ids.shape[1] // joined)
        self._note(loader, "row_tokens", tokens)
        wanted = self._target(loader) or 0
        if wanted <= tokens:
            return batch
        self._note(loader, "lengthened_to", wanted)
        length = wanted * joined
        for name, value in columns.items():
            if isinstance(value, torch.Tensor) and value.shape == ids.shape:
                columns[name] = value.repeat(1, -(-length // ids.shape[1]))[:, :length]
        return batch if columns is batch else columns["input_ids"]

    def _note(self, loader: Any, name: str, tokens: int | None) -> None:
        seen = self._seen.setdefault(loader, {})
        if tokens is not None:
            seen[name] = max(tokens, seen.get(name, 0))

    def trained(self, loader: Any) -> None:
        """Note that the batches of this loader train."""
        for name, tokens in self._seen.get(loader, {}).items():
            setattr(self.answer, name, max(tokens, getattr(self.answer, name) or 0))

    def _target(self, loader: Any) -> int | None:
        if loader not in self._targets:
            longest, most = longest_row(loader), self.answer.max_length
            self._note(loader, "longest_row", longest)
            known = min(longest, most or longest) if longest and self.request.gpu else None
            self._targets[loader] = self.request.tokens or known
        return self._targets[loader]


def longest_row(loader: Any) -> int | None:
    """Return the most tokens of a row of a data set of Hugging Face's, whose columns know it. None of others."""
    table: Any = getattr(getattr(loader, "_dataset", None), "data", None)
    if "input_ids" not in getattr(table, "column_names", ()):
        return None
    import pyarrow.compute

    return pyarrow.compute.max(pyarrow.compute.list_value_length(table.column("input_ids"))).as_py()
