"""Values of a config with which a library does not start: by the types of its keys, and by what excludes each other."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
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


# Keys of ranks that have the same rows.
SHARE_ROWS = ("tensor_parallel", "sequence_parallel_size", "pipeline", "parallelism_config")


def refused_values(library: str, config: dict, ranks: int | None = None) -> Iterator[RefusedValue]:
    """Yield each value with which a library does not start, on so many ranks if they are known."""
    known = known_libraries()[library]
    values: dict[str, Any] = {}
    for section, defaults in known["sections"].items():
        values |= {f"{section}.{key}".lstrip("."): default for key, default in defaults.items()}
    for path, kind, value in _typed(known["types"], config):
        try:
            values[path] = SchemaValidator(kind).validate_python(value)
        except ValidationError as error:
            yield RefusedValue(f"{path} {sentence(error)}", path, error.errors()[0]["type"] == "removed")
    for together in known["exclusive"]:
        if together.items() <= values.items():
            yield RefusedValue(f"{json.dumps(together)[1:-1]} exclude each other")
    parts = (values.get("train_micro_batch_size_per_gpu"), values.get("gradient_accumulation_steps"))
    share = any(key in config for key in SHARE_ROWS)
    if problem := refused_rows(values.get("train_batch_size"), *parts, None if share else ranks):
        yield RefusedValue(problem)


def refused_rows(rows: float | None, micro_batch: float | None, passes: float | None, ranks: float | None) -> str:
    """Return that DeepSpeed does not take the rows of a step, which are the product of the others. None: not known."""
    of = {"sequences": micro_batch, "ranks": ranks, "micro-batches": passes}
    known = {what: number for what, number in of.items() if number}
    factors = " x ".join(f"{number:g} {what}" for what, number in known.items())
    product = prod(known.values())
    if not rows or rows == product or (rows % product == 0 and len(known) < len(of)):
        return ""
    return f"train_batch_size of {rows:g} is {'not' if len(known) == len(of) else 'no multiple of'} {factors}"


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
