"""What is held to what: adapters (a library, and how it wraps a training), properties, and why some of them fail.

`Ranks` starts the process that runs them. This module needs no torch.
"""

import csv
import json
import os
import subprocess
import sys
import tomllib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from study.core.arms import PACKAGE
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

    @property
    def functions(self) -> tuple[str, ...]:
        """Return the functions of an adapter that it calls. Every adapter may lack gradient_norm."""
        always = ("build", "forward_backward", "step", "whole_weights")
        return (*always, "save", "load") if self.check.startswith("checkpoint") else always


@dataclass(frozen=True)
class Adapter:
    """A file with the functions of an adapter, and the settings that it gets."""

    name: str
    file: str  # a path, or the name of one of ours
    about: str
    package: str = ""  # the library whose releases change the answers
    settings: dict = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return HERE / "adapters" / f"{self.file}.py" if self.package else Path(self.file)


@dataclass(frozen=True)
class Answer:
    """What one property is with one adapter and these libraries: a row of reports/conform/answers.csv."""

    adapter: str
    property: str
    torch: str
    deepspeed: str  # empty: not used
    accelerate: str
    answer: str  # holds, fails, refused (by the library, in its words) or not applicable
    words: str
    kind: str  # of a failure: `differs` is a wrong result without a message


def libraries(answer: Answer) -> str:
    """Return the libraries of an answer, with their versions."""
    return f"torch {answer.torch}, deepspeed {answer.deepspeed or '-'}, accelerate {answer.accelerate or '-'}"


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return tuple(value) if isinstance(value, list) else value


def _property(row: dict[str, str]) -> Property:
    case = {name: _value(text) for name, text in row.items() if text}
    about = {name: case.pop(name) for name in Property.__dataclass_fields__ if name in case}
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
        named = answer.adapter in each["adapters"] and {answer.property, "*"} & {*each["properties"]}
        release = getattr(answer, each.get("package", "deepspeed")) or "0"
        if named and answer.answer in ("fails", "refused") and release in SpecifierSet(each.get("releases", "")):
            return f"{each['kind']}: {each['why']} Does a GPU take the same path: {each['gpu']}."
    return ""


class Ranks:
    """The process that forks the ranks of each property (ranks.py). Use it as a context manager.

    `overlay`: a folder with a release of a library, used instead of the installed one.
    """

    def __init__(self, log: Path, overlay: Path | None = None) -> None:
        paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ.copy()
        if overlay:
            paths = [str(overlay.resolve()), *paths]
            env["TORCH_EXTENSIONS_DIR"] = f"{paths[0]}-operators"  # compiled from its sources, and kept
        env["PYTHONPATH"] = os.pathsep.join(paths)
        self.log = log.open("w")
        command, pipe = [sys.executable, "-P", "-m", "study.conform.ranks"], subprocess.PIPE
        self.process = subprocess.Popen(command, env=env, text=True, stdin=pipe, stdout=pipe, stderr=self.log)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_) -> None:
        self.process.communicate(timeout=30)
        self.log.close()

    def ask(self, adapter: Adapter, name: str, scripts: Path | None = None, limit_s: float = LIMIT_S) -> Answer:
        """Hold an adapter to a property. A failure is written as a script into the folder `scripts`."""
        request = {"adapter": asdict(adapter), "name": name, "scripts": scripts and str(scripts), "limit_s": limit_s}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        reply = json.loads(self.process.stdout.readline() or '{"stop": "the process that runs the ranks ended"}')
        if "stop" in reply:
            raise Stop(f"{adapter.name}: {reply['stop']}", f"read {self.log.name}, and mend what it says")
        return Answer(**reply)
