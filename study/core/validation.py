"""Turns pydantic's errors into one sentence: where the mistake is, what was expected, and what came."""

import difflib
import reprlib
from collections.abc import Iterable

from pydantic import ValidationError
from pydantic_core import ErrorDetails

TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a text",
    "dict": "a table",
    "model": "a table",
    "list": "a list",
    "tuple": "a list",
    "date": "a date such as 2026-11-20, in TOML without quotes",
    "path": "a path",
    "is_instance_of": "a path",
}

SHOWN = reprlib.Repr()
SHOWN.maxstring = SHOWN.maxother = 80
# names and values in a file may have any length
LONGEST_NAME = 80
LONGEST_SENTENCE = 600

PLAINER = {"Input should be": "must be", "greater than or equal to": "at least", "less than or equal to": "at most"}


def sentence(error: ValidationError, known: Iterable[str] = (), name=".".join) -> str:
    """The first mistake as a sentence. `known` are the possible field names; `name` turns a location into text."""
    first = error.errors(include_url=False)[0]
    where = name([str(part) for part in first["loc"] if not str(part).endswith((")", "]"))])
    text = f"{where[-LONGEST_NAME:]} {_problem(first, known)}".strip()
    return text if len(text) <= LONGEST_SENTENCE else f"{text[:LONGEST_SENTENCE]}..."


def _problem(first: ErrorDetails, known: Iterable[str]) -> str:
    kind = first["type"]
    message = first["msg"]
    came = first.get("input")
    if kind == "missing":
        return "is missing"
    if kind == "string_too_long":
        return f"must have at most {first['ctx']['max_length']:,} characters (got {len(str(came)):,})"
    if kind == "extra_forbidden":
        return f"is not known; {nearest(str(first['loc'][-1]), known)}" if known else "is not known"
    if kind.startswith(("literal", "greater_than", "less_than", "finite")):
        for words, plainer in PLAINER.items():
            message = message.replace(words, plainer)
        return f"{message} (got {SHOWN.repr(came)})"
    expected = next((words for prefix, words in TYPES.items() if kind.startswith(prefix)), None)
    return f"must be {expected} (got {SHOWN.repr(came)})" if expected else message.removeprefix("Value error, ")


def nearest(name: str, known: Iterable[str], most: int = 1, otherwise: str | None = None) -> str:
    """At most so many known names that are close to a misspelt one. If none is close: `otherwise`, or all names."""
    by_lower = {each.lower(): each for each in known}
    if close := [by_lower[lower] for lower in difflib.get_close_matches(name[:LONGEST_NAME].lower(), by_lower, n=most)]:
        *others, last = map(repr, close)
        return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?"
    return otherwise or f"choose one of {', '.join(by_lower.values())}"
