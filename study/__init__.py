"""A replication study of DeepSpeed ZeRO that anyone can run."""

import importlib
import os

from study.machine.software import operators_folder

WATCHES = {"watch": "study.watcher.watch", "WatchCallback": "study.watcher.callback"}  # loaded on first use
# PyTorch reads this variable, and every child process inherits it. A user's own choice is kept.
CHOSEN_HERE = "TORCH_EXTENSIONS_DIR" not in os.environ
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(operators_folder()))


def __getattr__(name: str):
    if name not in WATCHES:
        raise AttributeError(f"module 'study' has no attribute {name!r}")
    if CHOSEN_HERE and not operators_folder().is_dir():  # in somebody else's script, what it compiled must be in use
        os.environ.pop("TORCH_EXTENSIONS_DIR", None)
    return getattr(importlib.import_module(WATCHES[name]), name)
