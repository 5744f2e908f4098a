"""What is held to what: adapters, properties, why some of them fail, and the process that runs them. Needs no torch."""

import importlib
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.version import Version
from pydantic import with_config

from study.core.errors import Stop
from study.core.tables import NO_OTHER_KEYS, read_table
from study.known.faults import table
from study.known.findings import with_id

HERE = Path(__file__).parent
PROPERTIES_TABLE = HERE / "properties.toml"
ADAPTERS_TABLE = HERE / "adapters.toml"
NEEDED = ("build", "forward_backward", "step", "whole_weights")  # functions of an adapter
LIBRARIES = ("torch", "deepspeed", "accelerate")
LIMIT_S = 120  # for one property; it takes about a second


@dataclass(frozen=True)
@with_config(NO_OTHER_KEYS)
class Property:
    """One thing that sharded training must keep: a row of properties.toml."""

    sentence: str
    source: str
    check: str = "same_training"
    ranks: Sequence[int] = (2,)  # of each launch
    model: str = "Plain"
    needs: str = ""  # a function that an adapter may lack: save, schedules, inner, loss_scale
    case: dict = field(default_factory=dict)  # the settings of its training that are not the defaults
    name: str = ""  # of its row


@dataclass(frozen=True)
@with_config(NO_OTHER_KEYS)
class Adapter:
    """A file with the functions of an adapter, and the settings that it gets: a row of adapters.toml, or a user's."""

    file: str  # of the folder adapters/, or with its whole path
    about: str
    settings: dict = field(default_factory=dict)
    ranks: int = 2  # another number: the only one with which it can run
    name: str = ""  # of its row
    package: str = ""  # of its table: the library whose releases change the answers

    @property
    def path(self) -> Path:
        return HERE / "adapters" / self.file

    def ranks_for(self, each: Property) -> Sequence[int]:
        """Return the ranks of each launch of a property; empty if the adapter cannot have so many."""
        if self.ranks == 2:
            return each.ranks
        # A property of two ranks is as good on the only number that there is. One that changes it cannot be asked.
        if set(each.ranks) in ({2}, {self.ranks}):
            return (self.ranks,) * len(each.ranks)
        return ()


@dataclass(frozen=True)
class PropertyAnswer:
    """What one property is with one adapter and these libraries: a row of reports/conform/answers.csv."""

    adapter: str
    property: str
    torch: str
    deepspeed: str  # empty: not used
    accelerate: str
    answer: str  # holds, fails, refused (by the library, in its words) or not applicable
    words: str = ""
    kind: str = ""  # of a failure: `differs` is a wrong result without a message


def libraries(answer: PropertyAnswer) -> str:
    """Return the libraries of an answer, with their versions."""
    return ", ".join(f"{name} {getattr(answer, name) or '-'}" for name in LIBRARIES)


def properties() -> dict[str, Property]:
    groups = read_table(PROPERTIES_TABLE, dict[str, dict[str, Property]], Property)
    return {name: replace(row, name=name) for rows in groups.values() for name, row in rows.items()}


def adapters() -> dict[str, Adapter]:
    tables = read_table(ADAPTERS_TABLE, dict[str, dict[str, Adapter]], Adapter)
    return {
        name: replace(row, name=name, package=package) for package, rows in tables.items() for name, row in rows.items()
    }


PROPERTIES = properties()
ADAPTERS = adapters()


def explanation(answer: PropertyAnswer) -> str:
    """Return why a property fails or is refused with these releases; empty if nobody knows yet."""
    for fault in table().fault:
        if (
            answer.answer in ("fails", "refused")
            and answer.adapter in fault.adapters
            and {answer.property, "*"} & {*fault.properties}
            and fault.contains(Version(getattr(answer, fault.package) or "0"))
        ):
            said = f"{fault.kind}: {fault.why} Does a GPU take the same path: {fault.gpu}"
            return with_id(said, fault.id)
    return ""


class Ranks(ProcessPoolExecutor):
    """The process that forks the ranks of each property (ranks.py). Use it as a context manager."""

    def __init__(self, log: Path) -> None:
        self.log = log
        # Spawned, because a process that forks may have no threads, and nothing imported from elsewhere.
        super().__init__(1, multiprocessing.get_context("spawn"), redirect_output, (log,))

    def ask(self, adapter: Adapter, each: Property, limit_s: float = LIMIT_S) -> PropertyAnswer:
        """Hold an adapter to a property."""
        try:
            return self.submit(_answer, adapter, each, limit_s).result()
        # The adapter cannot be imported, or a library has ended the process while it was.
        except (ImportError, BrokenProcessPool) as error:
            raise Stop(f"{adapter.name}: {error}", f"read {self.log}, and fix what it says") from None


def redirect_output(log: Path) -> None:
    """Write what this process and its libraries print to a file."""
    # By file descriptor: compilers and C++ code write there, past sys.stdout.
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)


def _answer(adapter: Adapter, each: Property, limit_s: float) -> PropertyAnswer:
    ranks = importlib.import_module("study.conform.ranks")  # only in this process, for it imports torch
    return ranks.answer(adapter, each, limit_s)
