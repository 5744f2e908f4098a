"""Values of a config with which a library does not start: by the types of its keys, and by what excludes each other."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import SchemaValidator

from study.core.files import section_at, sentence
from study.core.library_defaults import known_libraries


@dataclass(frozen=True)
class RefusedValue:
    """A value that a library does not take."""

    problem: str
    path: str = ""  # its dotted path; empty: several values that exclude each other
    was_removed: bool = False  # its key is one that an older release may take


def refused_values(library: str, config: dict) -> Iterator[RefusedValue]:
    """Yield each value with which a library does not start."""
    known = known_libraries()[library]
    values: dict[str, Any] = {}
    for section, defaults in known["sections"].items():
        values |= {f"{section}.{key}".lstrip("."): default for key, default in defaults.items()}
    for path, kind, value in _typed(known["types"], config):
        try:
            values[path] = SchemaValidator(kind).validate_python(value)
        except ValidationError as error:
            yield RefusedValue(f"{path} {sentence(error)}", path, error.errors()[0]["type"] == "removed")
    for problem in _impossible(values, known["exclusive"]):
        yield RefusedValue(problem)


def truths_for_numbers(library: str, config: dict) -> Iterator[str]:
    """Yield the dotted paths of whole numbers that are true or false, which a library takes for 1 or 0 in silence."""
    for path, kind, value in _typed(known_libraries()[library]["types"], config):
        if isinstance(value, bool) and kind.get("schema", kind)["type"] == "int":
            yield path


def _typed(types: dict[str, dict], config: dict) -> Iterator[tuple[str, Any, Any]]:
    """Yield each value whose type a library knows: its dotted path, the type and the value."""
    for path, of_section in types.items():
        for key, value in section_at(config, path).items():
            if key in of_section and value != "auto":  # Accelerate or the Trainer fills it in
                yield f"{path}.{key}".lstrip("."), of_section[key], value


def _impossible(values: dict[str, Any], exclusive: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the values with which a library does not start together, by their dotted paths."""
    for together in exclusive:
        if together.items() <= values.items():
            yield f"{json.dumps(together)[1:-1]} exclude each other"
    # DeepSpeed wants train_batch_size = micro-batch x gradient accumulation x ranks.
    rows = values.get("train_batch_size") or 0
    parts = (values.get("train_micro_batch_size_per_gpu") or 1) * (values.get("gradient_accumulation_steps") or 1)
    if rows % parts:
        yield f"no number of ranks gives a train_batch_size of {rows:g}, with {parts:g} sequences on each"
