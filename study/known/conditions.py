"""Can what a fault asks for be so at all? A key that no config has, or a value it cannot have, would hide the fault."""

import json
import re
from collections.abc import Container, Iterator
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from pydantic import ValidationError
from pydantic_core import CoreSchema, SchemaValidator, core_schema

from study.core.errors import nearest
from study.core.library_defaults import known_libraries, paths

Values = list[int | str] | Literal["true or false", "a number"]  # that a condition can have
NOTHING = ("none", "auto")  # texts for a key that is not there, or that something else fills in
EXAMPLE = 'keys = [{ "zero_optimization.overlap_comm" = true }]'
# Keys of which a condition says the same, for whoever has no config: its flag answers it.
SAID_BY = {"zero_optimization.offload_optimizer.device": "offload", "zero_optimization.stage": "stage"}
QUESTION = re.compile("(Is|Are|Was|Were|Has|Have|Does|Do|Did|Should|Can|Must|Will) .")
GROUPS = SchemaValidator(core_schema.list_schema(core_schema.dict_schema()))
ANYTHING: CoreSchema = core_schema.any_schema()  # the type of a key of which only the name is known


def wrong_condition(name: str, wanted: Any, values: Values) -> Iterator[str]:
    """Yield what is wrong with a condition that a flag or a config answers."""
    if values == "true or false":
        if type(wanted) is not bool:
            yield f"`{name}` must be true or false (got {wanted!r})"
    elif values == "a number":
        if type(wanted) is not int:
            yield f"`{name}` must be a number, the least (got {wanted!r})"
    elif not isinstance(wanted, list):
        yield f"`{name}` must be a list, of which one fits: {name} = [{json.dumps(wanted)}]"
    else:
        for each in wanted:
            if isinstance(each, bool) or each not in values:
                yield f"`{name}` cannot be {each!r}: {nearest(str(each), map(str, values))}"


def wrong_release(name: str, wanted: Any) -> Iterator[str]:
    """Yield what is wrong with the releases of another package."""
    try:
        SpecifierSet(wanted)
    except (ValueError, AttributeError, TypeError):
        yield f'`{name}` must be a range of releases, such as ">=0.19.3" (got {wanted!r})'


def wrong_script(wanted: Any) -> Iterator[str]:
    """Yield what is wrong with what is asked about somebody's script."""
    if not QUESTION.match(str(wanted)):
        yield f'`script` must be a question, without its end: script = "Is a checkpoint loaded" (got {wanted!r:.80})'


def wrong_keys(groups: Any, others: Container[str]) -> Iterator[str]:
    """Yield what is wrong with `keys`. `others` are keys of programs whose configs are not kept here."""
    if not _is_valid(GROUPS, groups):
        yield f"`keys` must be a list of groups: {EXAMPLE}"
        return
    for group in groups:
        for path, wanted in group.items():
            types = [ANYTHING] if path in others else _types(path)
            if types:
                yield from _wrong_value(path, wanted, types)
            else:
                yield _unknown(path)


def _unknown(path: str) -> str:
    """Return what is said of a key that no library has, with the nearest that one has."""
    known = [each for library in known_libraries() for each, _ in paths(library)]
    if whole := [each for each in known if each.endswith(f".{path}")]:
        meant = f"write its whole path: {' or '.join(whole)}."
    else:
        meant = nearest(path, known, otherwise="write its whole path, such as zero_optimization.overlap_comm")
    others = "One of another program belongs into `other_keys` of faults.toml"
    return f"`{path}` is no key of DeepSpeed, Accelerate or the Trainer; {meant} {others}"


def _wrong_value(path: str, wanted: Any, types: list[CoreSchema]) -> Iterator[str]:
    """Yield what is wrong with the value of a key."""
    if wanted is True or wanted == "absent":
        return
    if isinstance(wanted, str):
        yield f"`{path}` must be a list, of which one fits: [{json.dumps(wanted.lower())}]"
    elif isinstance(wanted, list):
        for each in wanted:
            yield from _wrong_text(path, each, types)
        if path in SAID_BY:
            values = ", ".join(str(each) if str(each).isdigit() else json.dumps(each) for each in wanted)
            instead = f"when = {{ {SAID_BY[path]} = [{values}] }}"
            yield f"`{path}` is said by a condition, which a flag answers as well: in place of this key write {instead}"
    elif isinstance(wanted, int) and not _takes(types, json.dumps(wanted)):
        yield f"`{path}` cannot be {json.dumps(wanted)}: write what a config may have there"


def _wrong_text(path: str, text: Any, types: list[CoreSchema]) -> Iterator[str]:
    """Yield what is wrong with a value of a list, which is compared with a config in lower case."""
    lower = str(text).lower()
    if isinstance(text, bool) or str(text) != lower:
        yield f'`{path}` is compared as a text in lower case: write "{lower}" in place of {text!r}'
    elif lower not in NOTHING and not _takes(types, lower):
        yield f"`{path}` cannot be {text!r}: write what a config may have there"


def _types(path: str) -> list[CoreSchema]:
    """Return the types that libraries have for a key. Empty: none has such a key."""
    types = []
    for library in known_libraries().values():
        section, _, name = path.rpartition(".")
        type_of_key = library["types"].get(section, {}).get(name, ANYTHING)
        while section not in library["sections"]:  # its keys are not kept: whatever it has counts as one
            section, _, name = section.rpartition(".")
        if name in library["sections"][section]:
            types.append(type_of_key)
    return types


def _takes(types: list[CoreSchema], text: str) -> bool:
    """Whether a key of one of these types takes a value, as a text or as what the text is in JSON."""
    values: list[Any] = [text]
    if re.fullmatch(r"true|false|-?\d+(\.\d+)?(e-?\d+)?", text):
        values.append(json.loads(text))
    validators = [SchemaValidator(each) for each in types]
    return any(_is_valid(validator, value) for validator in validators for value in values)


def _is_valid(validator: SchemaValidator, value: Any) -> bool:
    try:
        validator.validate_python(value)
    except ValidationError:
        return False
    return True
