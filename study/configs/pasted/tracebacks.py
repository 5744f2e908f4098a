"""Find errors whose meaning is known, by their messages: tracebacks.toml, read into types."""

import functools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

TABLE = Path(__file__).with_name("tracebacks.toml")
LONGEST = 200  # characters of a line that are quoted


@dataclass(frozen=True)
class Seen:
    """Something that a text shows: what it means, what to do, and how sure that is."""

    id: str
    sentence: str
    do: str
    sure: Literal["sure", "likely", "possible"]
    rests_on: str
    who: str = ""
    fault: str = ""  # of known/faults.toml
    follows: bool = False  # something else happened first
    place: int = 0  # in the text
    line: str = ""  # of the text, that shows it


@dataclass(frozen=True)
class Message:
    """A row of the table. The fields are explained there."""

    pattern: re.Pattern
    sentence: str
    do: str
    sure: Literal["sure", "likely", "possible"]
    rests_on: str
    example: str
    also: str = ""
    without: str = ""
    who: str = ""
    fault: str = ""
    hides: tuple[str, ...] = ()
    follows: bool = False


@functools.cache
def messages() -> dict[str, Message]:
    rows: dict[str, dict[str, Any]] = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {id: Message(**row | {"pattern": re.compile(row["pattern"], re.MULTILINE)}) for id, row in rows.items()}


def errors(text: str) -> list[Seen]:
    """Return the errors that a text has: the first that happened comes first, and what follows from others last."""
    found = {}
    for id, message in messages().items():
        match = message.pattern.search(text)
        if match is None or not re.search(message.also, text):
            continue
        if message.without and re.search(message.without, text):
            continue
        found[id] = Seen(
            id=id,
            sentence=_filled(message.sentence, match),
            do=_filled(message.do, match),
            sure=message.sure,
            rests_on=message.rests_on,
            who=message.who,
            fault=message.fault,
            follows=message.follows,
            place=match.start(),
            line=line_at(text, match.start()),
        )
    hidden = {hides for id in found for hides in messages()[id].hides}
    return sorted((seen for id, seen in found.items() if id not in hidden), key=lambda seen: (seen.follows, seen.place))


def _filled(sentence: str, match: re.Match) -> str:
    """Return a sentence with what the message names. Other braces in it are those of configs."""
    for name, value in match.groupdict().items():
        sentence = sentence.replace(f"{{{name}}}", value or "?")
    return sentence


def line_at(text: str, place: int) -> str:
    """Return the line of a text at a place, short."""
    begin = max(text.rfind("\n", 0, place) + 1, place - LONGEST // 2)
    end = text.find("\n", place)
    line = " ".join(text[begin : end if end >= 0 else len(text)].split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."
