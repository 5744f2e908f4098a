"""Reads a file into a type. Every fault of a file is one sentence: which file, what is wrong, and what to do."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from study.core import files, parsing
from study.core.errors import Stop
from study.core.validation import sentence

T = TypeVar("T")


def load(
    path: Path,
    model: type[T],
    *,
    what: str,
    remedy: str,
    most_bytes: int,
    links: bool = False,
    missing: str = "",
    known: Iterable[str] = (),
) -> T:
    """Return the content of a JSON, TOML or YAML file as a type. Raise Stop if it cannot be read, or is not valid.

    `what` names the content: "a record". `missing` is what to do if there is no such file. Links are followed only if
    the user named the file, and never where it may be a stranger's. `known` are the names that the content may have.
    """
    try:
        content = files.read(path, most_bytes) if links else files.read_below(path.parent, path.name, most_bytes)
    except OSError as error:
        absent = isinstance(error, FileNotFoundError) and missing
        raise Stop(f"{str(path)!r:.300} cannot be read ({files.why(error)})", missing if absent else remedy) from None
    try:
        return _parsed(path.suffix, content, model)
    except ValidationError as error:
        raise Stop(f"{path} is not {what}: {sentence(error, known)}", remedy) from None
    except (ValueError, RecursionError) as error:
        raise Stop(f"{str(path)!r:.300} cannot be read ({files.why(error)})", remedy) from None


def _parsed(suffix: str, content: bytes, model: type[T]) -> T:
    adapter = TypeAdapter(model)
    if suffix == ".json" and model is not Any:  # in one pass, as records are many
        return adapter.validate_json(content)
    parse = {".json": parsing.from_json, ".toml": parsing.from_toml}.get(suffix, parsing.from_yaml)
    return adapter.validate_python(parse(content))
