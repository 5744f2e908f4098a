"""Patches of libraries, each applied when the script imports the library."""

import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from study.rehearsal.count import Count
from study.rehearsal.request import Request
from study.rehearsal.values import Shapes


@dataclass(frozen=True)
class Rehearsal:
    """What patches need to know: what was asked, what has values, and what is counted."""

    request: Request
    shapes: Shapes
    count: Count

    @property
    def on_cpu(self) -> bool:
        """Whether this machine's memory takes the place of the GPU's."""
        return self.count.watch.device_type == "cpu"


Patch = Callable[[Rehearsal, types.ModuleType], None]


class WhenImported(importlib.abc.MetaPathFinder):
    """Applies a patch to a module right after it was imported."""

    def __init__(self, rehearsal: Rehearsal, patches: dict[str, Patch]):
        self.rehearsal = rehearsal
        self.patches = patches

    def attach(self) -> None:
        for name in self.patches.keys() & sys.modules.keys():  # that we have imported ourselves
            self.patches.pop(name)(self.rehearsal, sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(self, name, path, target=None):
        patch = self.patches.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module) -> None:
            load(module)
            patch(self.rehearsal, module)

        loader.exec_module = exec_module
        return spec
