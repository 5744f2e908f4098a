"""The keys and defaults of DeepSpeed's, Accelerate's and the Trainer's configs, for use without these libraries.

`library_defaults.json` is exported from their own config classes by tests/test_library_defaults.py.
"""

import functools
import json
from pathlib import Path
from typing import Any, Literal

FILE = Path(__file__).with_suffix(".json")
Library = Literal["deepspeed", "accelerate", "trainer"]


@functools.cache
def sections(library: Library) -> dict[str, dict[str, Any]]:
    """Return the defaults by key, for each section of a library's config by its dotted path. The top is ""."""
    return json.loads(FILE.read_text())[library]["sections"]


def zero_optimization(config: dict | None) -> dict[str, Any]:
    """Return the section `zero_optimization` of a DeepSpeed config, with the defaults of keys that it does not have."""
    return sections("deepspeed")["zero_optimization"] | ((config or {}).get("zero_optimization") or {})
