"""Reads the tables of this package, to which people add rows by hand: a mistake is told by file, row and key."""

import re
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, ConfigDict

from study.core.files import load

MOST_BYTES = 2**20
NO_OTHER_KEYS = ConfigDict(extra="forbid")  # of a row: @with_config(NO_OTHER_KEYS)
T = TypeVar("T")


def read_table(path: Path, shape: type[T], row: type) -> T:
    """Return the content of a table as a type. Raise Stop for a row that lacks a key, or has one that is not known.

    `row` is the type of its rows, which is named to whoever has to correct one.
    """
    known = [key for each in row.__mro__ for key in vars(each).get("__annotations__", {})]
    module = row.__module__.replace(".", "/")
    return load(
        path,
        shape,
        what="a table that commands can read",
        remedy=f"correct that row: {row.__name__} in {module}.py has its keys",
        most_bytes=MOST_BYTES,
        known=known,
    )


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern, re.MULTILINE)  # as most are used: Python keeps it for then
    except re.error as error:
        raise ValueError(f"is no regular expression of Python: {error}") from None
    return pattern


Regex = Annotated[str, AfterValidator(_compiles)]

PLACEHOLDER = re.compile(r"(?i)\b(?:todo|tbd|fixme|xxx)\b|\bexample\.(?:com|org|net)\b|^(?:\W*|n/?a|none|unknown)$")


def _can_be_looked_up(text: str) -> str:
    if PLACEHOLDER.search(text):
        raise ValueError(f"must be what somebody can look up, and no placeholder (got {text!r:.80})")
    return text


# What a sentence rests on: a file and its line, a thread, a claim, a run.
Evidence = Annotated[str, AfterValidator(_can_be_looked_up)]
