"""The ranks of a watched training. They exchange texts through the store of their process group.

A collective could hang, because all ranks would have to call it.
"""

import datetime
import itertools
import os
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from study.records import store

FOLDER_WITHIN_S = 60  # how long a rank waits for the first rank's folder

_count = itertools.count()  # numbers the watches of this process, in the same way on every rank


class Ranks:
    """This rank and the others of its process group. Ranks without a group cannot reach each other."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.count = 1
        self._store: dist.Store | None = None
        if dist.is_initialized():
            self.rank = dist.get_rank()
            self.count = dist.get_world_size()
            self._store = dist.PrefixStore(f"study.watch/{next(_count)}", _get_default_store())

    def send(self, name: str, text: str) -> None:
        if self._store is not None:
            self._store.set(name, text)

    def receive(self, name: str, timeout_s: float) -> str | None:
        """Return the text that another rank sent under this name; None if it does not arrive in time."""
        if self._store is None:
            return None
        try:
            self._store.wait([name], datetime.timedelta(seconds=timeout_s))
            return self._store.get(name).decode()
        except RuntimeError:  # it is late, or gone
            return None

    def agree_on_folder(self, run_dir: Path) -> Path | None:
        """Return the folder without a run that the first rank has made. None on a rank that cannot reach the first."""
        if self.rank != 0:
            name = self.receive("folder", FOLDER_WITHIN_S)
            return Path(name) if name else None
        folder = run_dir.resolve()
        number = 1
        while (folder / store.RECORD).exists():
            number += 1
            folder = run_dir.resolve().with_name(f"{run_dir.name}-{number}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            self.send("folder", "")  # so that the others do not wait for it
            raise
        self.send("folder", str(folder))
        return folder
