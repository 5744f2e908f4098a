"""Findings by their ids: of records in findings.toml, of steps in evidence.toml, of hangs in hangs.toml."""

import contextlib
import functools
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from study.core import files
from study.core.errors import Stop
from study.core.numbers import size
from study.records.hangs import Finding

OF_RECORDS = "findings.toml"
OF_EVIDENCE = "evidence.toml"
OF_HANGS = "hangs.toml"
ODD = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError)


@functools.cache
def texts(file: str) -> dict[str, dict[str, Any]]:
    """Return the sentence, remedy and evidence of each finding, by its id. Hangs have patterns as well."""
    return tomllib.loads(Path(__file__).with_name(file).read_text())


def finding(id: str, **values: Any) -> Finding:
    """Return a finding with its values in its sentence. Names that end in `_bytes` are shown as sizes."""
    text = (texts(OF_RECORDS) | texts(OF_EVIDENCE) | texts(OF_HANGS))[id]
    shown = {name: size(value) if name.endswith("_bytes") else value for name, value in values.items()}
    return Finding(
        text["sentence"].format(**shown),
        text["remedy"].format(**shown),
        text.get("evidence"),
        id=id,
        lost_s=values.get("lost_s"),
        memory_bytes=values.get("memory_bytes", values.get("grown_bytes")),
        traffic_bytes=values.get("traffic_bytes"),
    )


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings by size: mistakes first, then costs in seconds, in memory and in traffic, the largest first."""

    def place(finding: Finding) -> tuple[int, float]:
        sizes = (finding.lost_s, finding.memory_bytes, finding.traffic_bytes)
        return next(((kind, -size) for kind, size in enumerate(sizes, 1) if size is not None), (0, 0.0))

    return sorted(findings, key=place)


@contextlib.contextmanager
def in_form(path: Path) -> Iterator[None]:
    """Raise Stop where a value has not the form that its tool writes."""
    try:
        yield
    except ODD as error:
        what = f"{str(path)!r:.300} has not the form that its tool writes ({type(error).__name__}: {files.why(error)})"
        raise Stop(what, "write it again, or name another file") from None
