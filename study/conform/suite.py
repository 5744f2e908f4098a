"""What is held to what: adapters (a library, and how it wraps a training), properties, and why some of them fail.

`Ranks` starts the process that runs them. This module needs no torch.
"""

import contextlib
import csv
import importlib
import json
import multiprocessing
import os
import sys
import tomllib
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from study.core.errors import Stop

HERE = Path(__file__).parent
LIMIT_S = 40  # for one property; it takes about a second


@dataclass(frozen=True)
class Property:
    """One thing that sharded training must keep: a row of properties.csv, whose other columns are its case."""

    axis: str
    name: str
    sentence: str
    source: str
    check: str = "same_training"
    ranks: tuple[int, ...] = (2,)  # of each launch
    case: dict = field(default_factory=dict)  # the settings of its training that are not the defaults


@dataclass(frozen=True)
class Adapter:
    """A file with the functions of an adapter, and the settings that it gets."""

    name: str
    file: str  # a path, or the name of one of ours
    about: str
    package: str = ""  # the library whose releases change the answers
    settings: dict = field(default_factory=dict)
    ranks: int = 2  # another number: the only one with which it can run

    @property
    def path(self) -> Path:
        if self.package:
            return HERE / "adapters" / f"{self.file}.py"
        return Path(self.file)

    def ranks_for(self, each: Property) -> tuple[int, ...]:
        """Return the ranks of each launch of a property; empty if the adapter cannot have so many."""
        if self.ranks == 2:
            return each.ranks
        # A property of two ranks is as good on the only number that there is. One that changes it cannot be asked.
        if set(each.ranks) in ({2}, {self.ranks}):
            return (self.ranks,) * len(each.ranks)
        return ()


@dataclass(frozen=True)
class Answer:
    """What one property is with one adapter and these libraries: a row of reports/conform/answers.csv."""

    adapter: str
    property: str
    torch: str
    deepspeed: str  # empty: not used
    accelerate: str
    answer: str  # holds, fails, refused (by the library, in its words) or not applicable
    words: str = ""
    kind: str = ""  # of a failure: `differs` is a wrong result without a message


def libraries(answer: Answer) -> str:
    """Return the libraries of an answer, with their versions."""
    return f"torch {answer.torch}, deepspeed {answer.deepspeed or '-'}, accelerate {answer.accelerate or '-'}"


def _property(row: dict[str, str]) -> Property:
    """Return a row of properties.csv. Its cells are JSON, and texts stand there without quotes."""
    # Empty cells are defaults. Words are no JSON, and stay as they are.
    case: dict[str, Any] = {name: text for name, text in row.items() if text}
    for name, text in case.items():
        with contextlib.suppress(ValueError):
            case[name] = json.loads(text)
        if isinstance(case[name], list):
            case[name] = tuple(case[name])
    about = {name: case.pop(name) for name in [*case] if name in Property.__dataclass_fields__}
    return Property(**about, case=case)


def _table(name: str) -> dict[str, Any]:
    return tomllib.loads((HERE / name).read_text(encoding="utf-8"))


with (HERE / "properties.csv").open(encoding="utf-8") as file:
    PROPERTIES = {row["name"]: _property(row) for row in csv.DictReader(file)}
ADAPTERS = {
    name: Adapter(name, package=package, **row)
    for package, rows in _table("adapters.toml").items()
    for name, row in rows.items()
}
EXPLAINED = _table("explained.toml")["explained"]


def explanation(answer: Answer) -> str:
    """Return why a property fails or is refused with these releases; empty if nobody knows yet."""
    for each in EXPLAINED:
        release = getattr(answer, each.get("package", "deepspeed")) or "0"
        if (
            answer.answer in ("fails", "refused")
            and answer.adapter in each["adapters"]
            and {answer.property, "*"} & {*each["properties"]}
            and release in SpecifierSet(each.get("releases", ""))
        ):
            return f"{each['kind']}: {each['why']} Does a GPU take the same path: {each['gpu']}."
    return ""


class Ranks(ProcessPoolExecutor):
    """The process that forks the ranks of each property (ranks.py). Use it as a context manager.

    `overlay`: a folder with a release of a library, used instead of the installed one.
    """

    def __init__(self, log: Path, overlay: Path | None = None) -> None:
        self.log = log
        # Spawned, because a process that forks may have no threads, and nothing imported from elsewhere.
        super().__init__(1, multiprocessing.get_context("spawn"), _begin, (log, overlay and overlay.resolve()))

    def ask(self, adapter: Adapter, each: Property, limit_s: float = LIMIT_S) -> Answer:
        """Hold an adapter to a property."""
        try:
            return self.submit(_answer, adapter, each, limit_s).result()
        # The adapter cannot be imported, or a library has ended the process while it was.
        except (ImportError, BrokenProcessPool) as error:
            raise Stop(f"{adapter.name}: {error}", f"read {self.log}, and mend what it says") from None


def redirect_output(log: Path) -> None:
    """Write what this process and its libraries print to a file."""
    # By file descriptor: compilers and C++ code write there, past sys.stdout.
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)


def _begin(log: Path, overlay: Path | None) -> None:
    redirect_output(log)
    if overlay:
        sys.path.insert(0, str(overlay))
        os.environ["TORCH_EXTENSIONS_DIR"] = f"{overlay}-operators"  # compiled from its sources, and kept


def _answer(adapter: Adapter, each: Property, limit_s: float) -> Answer:
    ranks = importlib.import_module("study.conform.ranks")  # only in this process, for it imports torch
    return ranks.answer(adapter, each, limit_s)
