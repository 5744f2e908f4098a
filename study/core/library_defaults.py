"""The keys, types and defaults of DeepSpeed's, Accelerate's and the Trainer's configs, for use without these libraries.

Types are schemas of pydantic_core, which DeepSpeed's own classes check with. Here is nothing that a browser lacks.
"""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEFAULTS_FILE = Path(__file__).with_name("library_defaults.json")


@functools.cache
def known_libraries() -> dict[str, dict[str, Any]]:
    """Return what is known of the configs of deepspeed, accelerate and trainer: `version`, `sections`, `types` of keys.

    In the sections that are `closed` the library refuses other keys, and it refuses values that are `exclusive`.
    """
    return json.loads(DEFAULTS_FILE.read_text(encoding="utf-8"))


def library_defaults(library: str) -> dict[str, dict[str, Any]]:
    """Return the defaults by key, for each section of a library's config by its dotted path. The top is ""."""
    return known_libraries()[library]["sections"]


def paths(library: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted path of each key, and its default."""
    for section, defaults in library_defaults(library).items():
        for name, default in defaults.items():
            yield f"{section}.{name}".lstrip("."), default


def releases_of_defaults() -> str:
    """Return the libraries of `library_defaults` with their releases."""
    known = known_libraries()
    return ", ".join(f"{name} {known[name]['version']}" for name in known).replace("trainer", "transformers")
