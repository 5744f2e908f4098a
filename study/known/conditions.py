"""Can what a fault asks for be so at all? A key that no config has, or a value it cannot have, would hide the fault."""

import json
import re
from collections.abc import Container, Iterator
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from pydantic import ValidationError
from pydantic_core import SchemaValidator

from study.core.errors import nearest
from study.core.library_defaults import known_libraries

Values = list[int | str] | Literal["true or false", "a number"]  # that a condition can have
NOTHING = ("none", "auto")  # texts for a key that is not there, or that something else fills in
EXAMPLE = 'keys = [{ "zero_optimization.overlap_comm" = true }]'


def wrong_condition(name: str, wanted: Any, values: Values) -> Iterator[str]:
    """Yield what is wrong with a condition that a flag or a config answers."""
    if values == "true or false" and not isinstance(wanted, bool):
        yield f"`{name}` must be true or false (got {wanted!r})"
    elif values == "a number" and type(wanted) is not int:
        yield f"`{name}` must be a number, the least (got {wanted!r})"
    elif isinstance(values, list) and not isinstance(wanted, list):
        yield f"`{name}` must be a list, of which one fits: {name} = [{json.dumps(wanted)}]"
    elif isinstance(values, list):
        for each in wanted:
            if each not in values or isinstance(each, bool):
                meant = nearest(str(each), map(str, values))
                yield f"`{name}` cannot be {each!r}: {meant}"


def wrong_release(name: str, wanted: Any) -> Iterator[str]:
    """Yield what is wrong with the releases of another package."""
    try:
        SpecifierSet(wanted)
    except (ValueError, AttributeError, TypeError):
        yield f'`{name}` must be a range of releases, such as ">=0.19.3" (got {wanted!r})'


def wrong_keys(groups: Any, others: Container[str]) -> Iterator[str]:
    """Yield what is wrong with `keys`. `others` are keys of programs whose configs are not kept here."""
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        yield f"`keys` must be a list of groups: {EXAMPLE}"
        return
    for path, wanted in [pair for group in groups for pair in group.items()]:
        kinds = [kind for library in known_libraries() for kind in _kinds(library, path)]
        if not kinds and path not in others:
            meant = nearest(path, _paths(), otherwise="write its whole path, such as zero_optimization.overlap_comm")
            yield (
                f"`{path}` is no key of DeepSpeed, Accelerate or the Trainer; {meant} "
                "One of another program belongs into `other_keys` of faults.toml"
            )
        else:
            yield from _wrong_value(path, wanted, kinds)


def _wrong_value(path: str, wanted: Any, kinds: list[Any]) -> Iterator[str]:
    """Yield what is wrong with the value of a key. Those of a list are compared with a config in lower case."""
    if isinstance(wanted, str) and wanted != "absent":
        yield f"`{path}` must be a list, of which one fits: [{json.dumps(wanted.lower())}]"
    for each in wanted if isinstance(wanted, list) else []:
        if isinstance(each, bool) or str(each) != str(each).lower():
            yield f'`{path}` is compared as a text in lower case: write "{str(each).lower()}" in place of {each!r}'
        elif each not in NOTHING and not _takes(kinds, str(each)):
            yield f"`{path}` cannot be {each!r}: write what a config may have there"
    if isinstance(wanted, int) and wanted is not True and not _takes(kinds, json.dumps(wanted)):
        yield f"`{path}` cannot be {json.dumps(wanted)}: write what a config may have there"


def _kinds(library: str, path: str) -> list[Any]:
    """Return the type that a library has for a key, None where only the key is known. Empty: it has no such key."""
    known = known_libraries()[library]
    section, _, name = path.rpartition(".")
    if section not in known["sections"]:  # one whose keys are not kept
        return [None] if _kinds(library, section) else []
    if name not in known["sections"][section]:
        return []
    return [known["types"].get(section, {}).get(name)]


def _paths() -> list[str]:
    """Return all keys by their dotted paths."""
    sections = [pair for known in known_libraries().values() for pair in known["sections"].items()]
    return [f"{section}.{name}".lstrip(".") for section, names in sections for name in names]


def _takes(kinds: list[Any], text: str) -> bool:
    """Whether a key of one of these types takes a value, as a text or as what the text is in JSON."""
    values: list[Any] = [text]
    if re.fullmatch(r"true|false|-?\d+(\.\d+)?(e-?\d+)?", text):
        values.append(json.loads(text))
    return None in kinds or not kinds or any(_is_valid(kind, value) for kind in kinds for value in values)


def _is_valid(kind: Any, value: Any) -> bool:
    try:
        SchemaValidator(kind).validate_python(value)
    except ValidationError:
        return False
    return True
