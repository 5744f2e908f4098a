"""Let the ranks of a script exchange texts through the store of its process group.

A collective could hang, because all ranks would have to call it.
"""

import contextlib
import datetime
import itertools
import os

import torch.distributed as dist
from torch.distributed import distributed_c10d

_count = itertools.count()  # numbers the watches of this process, in the same way on every rank


class Ranks:
    """This rank and the others of its process group."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.count = 1
        if dist.is_initialized():
            self.rank = dist.get_rank()
            self.count = dist.get_world_size()
        self._store = distributed_c10d._get_default_store() if self.together else None
        self._prefix = f"study.watch/{next(_count)}"

    @property
    def together(self) -> bool:
        return self.count > 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def send(self, name: str, text: str) -> None:
        if self._store is not None:
            self._store.set(f"{self._prefix}/{name}", text)

    def send_last(self, name: str, text: str) -> None:
        """Send a text, whatever has failed before."""
        with contextlib.suppress(Exception):
            self.send(name, text)

    def receive(self, name: str, timeout_s: float) -> str | None:
        """Return the text that another rank sent under this name; None if it does not arrive in time."""
        if self._store is None:
            return None
        key = f"{self._prefix}/{name}"
        try:
            self._store.wait([key], datetime.timedelta(seconds=timeout_s))
            return self._store.get(key).decode()
        except RuntimeError:  # it is late, or gone
            return None
