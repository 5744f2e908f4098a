"""Other people's trainings: record one, say what is wrong with it, and what would have fitted."""

import importlib
import os

from study import CHOSEN_HERE
from study.core.machine import operators_folder

WATCHES = {
    "watch": "study.watch.session",
    "WatchCallback": "study.watch.callback",
    "LightningCallback": "study.watch.lightning",
}  # on first use: they need torch


def __getattr__(name: str):
    if name not in WATCHES:
        raise AttributeError(f"module 'study.watch' has no attribute {name!r}")
    if CHOSEN_HERE and not operators_folder().is_dir():  # in somebody else's script, what it compiled must be in use
        os.environ.pop("TORCH_EXTENSIONS_DIR", None)
    return getattr(importlib.import_module(WATCHES[name]), name)
