"""A finding in somebody's evidence: its sentence is in evidence.toml."""

import contextlib
import functools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study.errors import Stop
from study.io import files
from study.io.numbers import size
from study.records.hangs import Finding

TEXTS = Path(__file__).with_name("evidence.toml")
KNOWN = (
    "name a run, a memory snapshot, Flight Recorder dumps, a Chrome trace, NCCL Inspector's JSON, or a log of Slurm "
    "or torchrun"
)
ODD = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class Evidence:
    """What a file says. `state` is a sentence on the ranks, if it is about several."""

    kind: str
    findings: list[Finding]
    state: str | None = None


@functools.cache
def texts() -> dict[str, dict[str, str]]:
    """Return the sentence and the remedy of each finding, by its id."""
    return tomllib.loads(TEXTS.read_text())


def finding(id: str, **values: Any) -> Finding:
    """Return a finding with its values in its sentence. Names that end in `_bytes` are shown as sizes."""
    shown = {name: size(value) if name.endswith("_bytes") else value for name, value in values.items()}
    memory = values.get("unused_bytes", values.get("held_bytes"))
    return Finding(texts()[id]["sentence"].format(**shown), texts()[id]["remedy"], id=id, memory_bytes=memory)


@contextlib.contextmanager
def in_form(path: Path) -> Iterator[None]:
    """Raise Stop where a value has not the form that its tool writes."""
    try:
        yield
    except ODD as error:
        what = f"{str(path)!r:.300} has not the form that its tool writes ({type(error).__name__}: {files.why(error)})"
        raise Stop(what, "write it again, or name another file") from None
