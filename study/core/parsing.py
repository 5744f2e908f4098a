"""Reads JSON, TOML and YAML from a stranger as plain values. Every fault of a text is a ValueError."""

import json
import re
import tomllib
from collections.abc import Callable
from typing import Any

from study.core.files import why

MAX_DEPTH = 30  # of nested lists and tables: configs of DeepSpeed have 5
MAX_VALUES = 200_000  # in one text: the longest claims file has 12,000
MAX_CHARACTERS = 100_000  # of one string
MAX_BITS = 1000  # of a whole number: larger ones do not fit a float, and 4,300 digits cannot be printed
ODD = (AttributeError, KeyError, IndexError, TypeError, OverflowError)  # from a tag whose value does not fit
MAX_ALIASES = 10  # of a yaml file: a few aliases can stand for gigabytes
TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"
TOO_MANY = f"it has more than {MAX_VALUES:,} values"
# A word is only tried from its first letter: the time grew with the square of its length.
KEY = r"(?:(?<![\w-])[\w-]++|\"[^\"\n]*+\"|'[^'\n]*+')"
DOTTED = re.compile(rf"{KEY}(?:[ \t]*+\.[ \t]*+{KEY}){{{MAX_DEPTH}}}")  # in a TOML file: a.b.c = 1 means nested tables


def from_json(content: str | bytes, most_values: int = MAX_VALUES) -> Any:
    """Standard JSON, without NaN and infinity."""
    return _limited(lambda text: json.loads(text, parse_constant=_refuse_constant), content, most_values)


def from_toml(content: str | bytes) -> dict:
    def parse(text: str) -> dict:
        if DOTTED.search(text):  # the parser's time grows with the square of the keys
            raise ValueError(TOO_DEEP)
        return tomllib.loads(text)

    return _limited(parse, content)


def from_yaml(content: str | bytes) -> Any:
    import yaml  # not at the top: this module is used before packages are installed

    def parse(text: str) -> Any:
        try:
            depth = aliases = 0
            for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
                depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
                aliases += isinstance(event, yaml.AliasEvent)
                if depth > MAX_DEPTH:  # not later: the parser's time grows with the square of the depth
                    raise ValueError(TOO_DEEP)
                if aliases > MAX_ALIASES:
                    raise ValueError(f"it uses more than {MAX_ALIASES} yaml aliases")
                if count > MAX_VALUES:
                    raise ValueError(TOO_MANY)
            return yaml.safe_load(text)
        except (yaml.YAMLError, *ODD) as error:
            raise ValueError(getattr(error, "problem", None) or why(error)) from None

    return _limited(parse, content)


def refuse_excess(value: Any, most_values: int = MAX_VALUES) -> None:
    """A ValueError if a value is nested too deeply, or has too many or too long parts. It does not recurse."""
    level = [value]
    depth = 0
    count = 0
    while level:
        if depth > MAX_DEPTH:
            raise ValueError(TOO_DEEP)
        deeper: list = []
        for each in level:
            if isinstance(each, dict):
                deeper += [*each, *each.values()]
            elif isinstance(each, (list, tuple, set)):
                deeper += each
            else:
                _refuse_odd(each)
        count += len(level)
        if count + len(deeper) > most_values:
            raise ValueError(f"it has more than {most_values:,} values")
        level = deeper
        depth = depth + 1


def _refuse_odd(value: Any) -> None:
    """A ValueError for a string or number that cannot be written again."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError(f"it has a number of more than {MAX_BITS * 3 // 10} digits")
    if isinstance(value, str):
        if len(value) > MAX_CHARACTERS:
            raise ValueError(f"it has a text of {len(value):,} characters; the limit is {MAX_CHARACTERS:,}")
        if not value.isascii():
            value.encode()  # half of a character, as JSON's escapes can write it, is a UnicodeEncodeError


def _limited(parse: Callable[[str], Any], content: str | bytes, most_values: int = MAX_VALUES) -> Any:
    try:
        text = content if isinstance(content, str) else content.decode().removeprefix("\ufeff")
        value = parse(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    refuse_excess(value, most_values)
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")
