"""Holds adapters to properties, and makes what fails smaller. Needs no torch: a process of its own has that."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from study.core.arms import PACKAGE, ROOT
from study.core.errors import Stop
from study.core.operators import provide_libaio
from study.core.parsing import from_toml
from study.core.software import put_programs_on_path

HERE = Path(__file__).parent
COMMITTED = ROOT / "reports" / "conform"  # the results of this study
LIMIT_S = 40  # for one property; it takes about a second
SHRINK_S = 60
LIBRARIES = ("torch", "deepspeed", "accelerate")


@functools.cache
def table(name: str) -> dict[str, Any]:
    """Return what a TOML file of this folder contains."""
    return from_toml((HERE / f"{name}.toml").read_bytes())


DEFAULTS = table("properties")["defaults"]  # of a Case; a test compares them
SIMPLER = table("properties")["simpler"]
SCHEDULES = ("", "falling")  # those that need no schedule of the library


@dataclass(frozen=True)
class Property:
    """One thing that sharded training must keep."""

    name: str
    sentence: str
    source: str
    case: dict = field(default_factory=dict)  # the settings of its training that are not the defaults
    check: str = "same_training"
    ranks: tuple[int, ...] = (2,)  # of each launch

    def setting(self, name: str) -> Any:
        return self.case.get(name, DEFAULTS[name])

    @property
    def functions(self) -> tuple[str, ...]:
        """Return the functions of an adapter that it calls. Every adapter may lack gradient_norm."""
        always = ("build", "forward_backward", "step", "whole_weights")
        checkpoint = ("save", "load") if self.check.startswith("checkpoint") else ()
        return always + checkpoint + (() if self.setting("schedule") in SCHEDULES else ("schedule",))


@dataclass(frozen=True)
class Adapter:
    """A file with the functions of an adapter, and the settings that it gets."""

    name: str
    file: str  # a path, or the name of one of ours
    about: str = ""
    settings: dict = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return Path(self.file) if os.sep in self.file else HERE / "adapters" / f"{self.file}.py"

    @property
    def ranks(self) -> int | None:
        """The only number of ranks with which this way can run. None: any."""
        return self.settings.get("ranks")


@dataclass(frozen=True)
class Result:
    """The outcome of one property for one adapter."""

    adapter: str
    property: str
    status: str = "holds"  # or fails, refused, not applicable
    words: str = ""
    kind: str = ""  # of a failure: what must stay alike when it is made smaller
    shrunk: dict | None = None  # a smaller case that fails as well
    ranks: tuple[int, ...] = (2,)
    seconds: float = 0.0


STATUSES = ("holds", "fails", "refused", "not applicable")
PROPERTIES = {
    row["name"]: Property(**row | {"ranks": tuple(row.get("ranks", (2,)))}) for row in table("properties")["property"]
}
ADAPTERS = {name: Adapter(name, **row) for name, row in table("adapters").items()}


def smallest(result: Result) -> Property:
    """Return the property of a result, with the smallest case that fails."""
    each = PROPERTIES[result.property]
    return replace(each, case=each.case | (result.shrunk or {}), ranks=result.ranks)


def environment(overlay: Path | None) -> dict[str, str]:
    """Return the environment of a process that uses the libraries of an overlay instead of the installed ones."""
    paths = [str(overlay.resolve())] if overlay else []
    path = os.pathsep.join([*paths, str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    changed = {"PYTHONPATH": path}
    if overlay and (overlay / "deepspeed").is_dir():  # its operators are compiled from its sources, and kept
        changed["TORCH_EXTENSIONS_DIR"] = f"{paths[0]}-operators"
    return os.environ | changed


class Ranks:
    """The process that forks the ranks of each property. Use it as a context manager."""

    def __init__(self, overlay: Path | None, log: Path) -> None:
        if importlib.util.find_spec("torch") is None:
            raise ModuleNotFoundError(name="torch")
        put_programs_on_path()
        provide_libaio()
        self.log = log.open("w")
        command = [sys.executable, "-P", "-m", "study.conform.ranks"]
        env, pipe = environment(overlay), subprocess.PIPE
        self.process = subprocess.Popen(command, env=env, text=True, stdin=pipe, stdout=pipe, stderr=self.log)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_) -> None:
        self.process.communicate(timeout=30)
        self.log.close()

    def ask(self, adapter: Adapter, name: str, ranks: tuple[int, ...], case: dict, limit_s: float = LIMIT_S) -> dict:
        """Run a property with this case, in a fresh folder."""
        request = {"settings": adapter.settings, "property": name, "case": case, "ranks": ranks, "limit_s": limit_s}
        return self.answer(adapter, request)

    def answer(self, adapter: Adapter, request: dict) -> dict:
        """Return the answer to a request. To an empty one, it is the versions of the libraries that are used."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with tempfile.TemporaryDirectory(prefix="conform-") as folder:
            self.process.stdin.write(json.dumps({"adapter": str(adapter.path), "folder": folder} | request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        if not line:
            raise Stop(f"the process that runs {adapter.name} ended", f"read {self.log.name}")
        answer = json.loads(line)
        if "stop" in answer:
            raise Stop(answer["stop"], "mend the adapter, or install what it needs")
        return answer


def run(
    adapter: Adapter,
    properties: Iterable[Property],
    ranks: Ranks,
    report: Callable[[Result], object],
    shrink: bool = True,
) -> list[Result]:
    """Hold an adapter to properties, one after the other."""
    results = []
    for each in properties:
        result = run_one(adapter, each, ranks)
        if result.status == "fails" and shrink:
            result = shrunk(adapter, each, result, ranks)
        report(result)
        results.append(result)
    return results


def run_one(adapter: Adapter, each: Property, ranks: Ranks) -> Result:
    """Hold an adapter to a property."""
    launches = each.ranks
    if adapter.ranks is not None:
        if launches not in ((2,), (2, 2), (adapter.ranks,)):
            words = f"ranks of the property: {launches[-1]}; of the adapter: {adapter.ranks}"
            return Result(adapter.name, each.name, "not applicable", words)
        launches = (adapter.ranks,) * len(launches)
    answer = ranks.ask(adapter, each.name, launches, each.case)
    if answer.get("kind") == "hangs":  # or the machine was busy
        answer = ranks.ask(adapter, each.name, launches, each.case, 3 * LIMIT_S)
    answer.pop("time", None)
    return Result(adapter.name, each.name, **answer, ranks=launches)


def shrunk(adapter: Adapter, each: Property, result: Result, ranks: Ranks) -> Result:
    """Return a failure with the smallest case that still fails in the same way: field by field, then fewer ranks."""
    until, case = time.monotonic() + SHRINK_S, dict[str, Any]()

    def fails(case: dict, launches: tuple[int, ...]) -> bool:
        if time.monotonic() > until:
            return False
        answer = ranks.ask(adapter, each.name, launches, each.case | case, 15)
        return answer["status"] == "fails" and answer.get("kind") == result.kind

    for key, values in SIMPLER.items():
        own = each.setting(key)
        smaller = [value for value in values if (value < own if isinstance(own, int | float) else value != own)]
        case |= next(({key: value} for value in smaller if fails(case | {key: value}, result.ranks)), {})
    one = (1,) * len(result.ranks)
    alone = result.ranks != one and adapter.ranks is None and fails(case, one)
    return replace(result, shrunk=case, ranks=one if alone else result.ranks)
