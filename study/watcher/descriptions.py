"""The settings that `study diff` knows: what each changes and why, and where each kind of file has it."""

import functools
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FILE = Path(__file__).with_name("settings.toml")
Kind = Literal["deepspeed", "accelerate", "trainer", "record"]


class Description(BaseModel):
    """A setting by our name. The fields of the kinds of files are dotted paths."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    changes: str | None = None  # None: not known to change losses or memory
    why: str = ""
    unless: str | int | bool | None = None  # another value counts even if only one file has the setting
    deepspeed: str | None = None
    accelerate: str | None = None
    trainer: str | None = None
    record: str | None = None
    keys: tuple[str, ...] = ()

    def path(self, kind: Kind) -> str | None:
        return getattr(self, kind)


@functools.cache
def descriptions() -> dict[str, Description]:
    """Return all descriptions by name. The settings that matter most come first."""
    content = tomllib.loads(FILE.read_text())
    return {name: Description(name=name, **fields) for name, fields in content.items()}


@functools.cache
def covered_keys() -> frozenset[str]:
    """Return the last parts of all keys that our names cover."""
    keys: set[str] = set()
    for name, each in descriptions().items():
        paths = (each.deepspeed, each.accelerate, each.trainer, each.record)
        keys |= {name, *each.keys, *(path.rpartition(".")[2] for path in paths if path)}
    return frozenset(keys)


def value_at(content: Any, path: str) -> Any:
    """Return the value at a dotted path, or None. The empty path is the content itself."""
    for name in path.split(".") if path else ():
        content = content.get(name) if isinstance(content, dict) else None
    return content
