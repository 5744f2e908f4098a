"""What words of the field, and of this study, mean: for `study explain`, and for the report's first page."""

import functools

from study.core.arms import all_paths, first_sentence
from study.core.files import beside


@functools.cache
def meanings() -> dict[str, str]:
    """Return what each row of glossary.toml means. A row names one word, or several after commas."""
    return beside(__file__, "glossary.toml")


@functools.cache
def of_arms() -> dict[str, str]:
    """Return what each arm is, and each variant, by its name: the first sentence of its file."""
    return {name: first_sentence(path) for name, path in all_paths().items()}
