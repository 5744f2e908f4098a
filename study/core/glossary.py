"""What words of the field, and of this study, mean: for `study explain`, and for the report's first page."""

import functools
from pathlib import Path

from study.core.arms import all_paths, first_sentence
from study.core.files import from_toml

TABLE = Path(__file__).with_name("glossary.toml")


@functools.cache
def meanings() -> dict[str, str]:
    """Return what each row of glossary.toml means. A row names one word, or several after commas."""
    return from_toml(TABLE.read_text(encoding="utf-8"))


@functools.cache
def of_arms() -> dict[str, str]:
    """Return what each arm is, and each variant, by its name: the first sentence of its file."""
    return {name: first_sentence(path) for name, path in all_paths().items()}
