"""JSON, TOML and YAML from a stranger as plain values. What is wrong with a text is a ValueError, and nothing else."""

import json
import re
import tomllib
from collections.abc import Callable
from typing import Any

from study.inputs.files import why

MAX_DEPTH = 30  # of lists and tables in each other: configs of DeepSpeed have 5
MAX_VALUES = 200_000  # in one text: the longest claims file has 12,000
MAX_CHARACTERS = 100_000  # of a text in it
MAX_BITS = 1000  # of a whole number: a larger one is no float, and one of 4,300 digits cannot be printed
ODD = (AttributeError, KeyError, IndexError, TypeError, OverflowError)  # of a tag with a value that does not fit it
MAX_ALIASES = 10  # of a yaml file: a few of them can stand for gigabytes
TOO_DEEP, TOO_MANY = f"it is nested more than {MAX_DEPTH} deep", f"it has more than {MAX_VALUES:,} values"
KEY = r"(?:[\w-]++|\"[^\"\n]*+\"|'[^'\n]*+')"
DOTTED = re.compile(rf"{KEY}(?:[ \t]*+\.[ \t]*+{KEY}){{{MAX_DEPTH}}}")  # of a TOML file: a.b.c = 1 are tables in tables


def from_json(content: str | bytes) -> Any:
    """JSON as the standard has it: NaN and infinity are none."""
    return _limited(lambda text: json.loads(text, parse_constant=_refuse_constant), content)


def from_toml(content: str | bytes) -> dict:
    def parse(text: str) -> dict:
        if DOTTED.search(text):  # the parser's time grows with the square of their number
            raise ValueError(TOO_DEEP)
        return tomllib.loads(text)

    return _limited(parse, content)


def from_yaml(content: str | bytes) -> Any:
    import yaml  # a package, and this one is used before any is installed

    def parse(text: str) -> Any:
        try:
            depth = aliases = 0
            for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
                depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
                aliases += isinstance(event, yaml.AliasEvent)
                if depth > MAX_DEPTH:  # at once: the parser's time grows with the square of the depth
                    raise ValueError(TOO_DEEP)
                if aliases > MAX_ALIASES:
                    raise ValueError(f"it uses more than {MAX_ALIASES} yaml aliases")
                if count > MAX_VALUES:
                    raise ValueError(TOO_MANY)
            return yaml.safe_load(text)
        except (yaml.YAMLError, *ODD) as error:
            raise ValueError(getattr(error, "problem", None) or why(error)) from None

    return _limited(parse, content)


def refuse_excess(value: Any) -> None:
    """A ValueError for what is nested too deeply, has too many values or too long a one. It does not recurse."""
    level, depth, count = [value], 0, 0
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
        if count + len(deeper) > MAX_VALUES:
            raise ValueError(TOO_MANY)
        level, depth = deeper, depth + 1


def _refuse_odd(value: Any) -> None:
    """A ValueError for a text or number that cannot be written down again."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError(f"it has a number of more than {MAX_BITS * 3 // 10} digits")
    if isinstance(value, str):
        if len(value) > MAX_CHARACTERS:
            raise ValueError(f"it has a text of {len(value):,} characters, at most {MAX_CHARACTERS:,} are read")
        if not value.isascii():
            value.encode()  # half of a character, as JSON's escapes can write it, is a UnicodeEncodeError


def _limited(parse: Callable[[str], Any], content: str | bytes) -> Any:
    try:
        text = content if isinstance(content, str) else content.decode().removeprefix("\ufeff")
        value = parse(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    refuse_excess(value)
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")
