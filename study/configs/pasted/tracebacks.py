"""What a text shows, in types; and errors whose meaning is known, by their messages: tracebacks.toml."""

import functools
import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import with_config

from study.configs import exit_codes
from study.core.tables import NO_OTHER_KEYS, Evidence, Regex, read_table

TRACEBACKS = Path(__file__).with_name("tracebacks.toml")
SIGNS = Path(__file__).with_name("signs.toml")
MOST_MATCHES = 9  # of a message that are looked at
LONGEST = 200  # characters of a line that are quoted
BEFORE = re.compile(r"(?m)^(?:[ \t]*(?:>|\u2502|\[(?:rank|default)\d+\]:|\(\w+ pid=\d+[^)\n]*\)))+|\u2502[ \t]*$")
# How a library goes on that lets two releases differ, as they are compatible (deepspeed/ops/op_builder/builder.py:117).
ACCEPTED = re.compile(r"[\s\d.]*\bbut\s+since\b[^\n]*\n?[^\n]*\baccepting\b")
# An error that ends a text, or one of several, and the words with which a pattern begins. What is cut shows at least so
# much of them.
LAST = re.compile(
    r"(?P<name>\b\w{0,80}(?:Error|Exception): )(?:CUDA error: )?(?P<said>[^\n]{20,300}?)[ .\u2026]{0,9}\s*?(?:\Z|\f)"
)
BEGINS = re.compile(r"(?:^|\|)(?:\(\?:)*((?:[^\\.^$*+?{}\[\]|()\n]|\\[^\w\n]|\\x27)+)(?![?*{])")
SHOWN = 0.7
CLASS = re.compile(r"(\[\^?\]?(?:\\.|[^\]\\])*\])")  # of characters, in a regular expression
Sure = Literal["sure", "likely", "possible"]
ORDER: tuple[Sure, ...] = ("sure", "likely", "possible")


@dataclass(frozen=True)
class Seen:
    """Something that a text shows: what it means, what to do, and how sure that is."""

    id: str  # that `study explain` takes
    sentence: str
    remedy: str
    sure: Sure
    evidence: str = ""
    who: str = ""
    fault: str = ""  # of known/faults.toml
    follows: bool = False  # something else happened first
    note: bool = False  # trainings that are well print it, too
    place: int = 0  # in the text
    line: str = ""  # of the text, that shows it

    def noted(self, begins: str) -> str:
        """Return it as a remark on its line, beside an answer."""
        return f"{begins}: {self.line}. {self.sentence} [{self.id}]. To do: {self.remedy}."


@dataclass(frozen=True)
@with_config(NO_OTHER_KEYS)
class Message:
    """A row of tracebacks.toml. The fields are explained there."""

    pattern: Regex
    sentence: str
    remedy: str
    sure: Sure
    evidence: Evidence
    also: Regex = ""
    without: Regex = "(?!)"
    who: str = ""
    fault: str = ""
    hides: tuple[str, ...] = ()
    follows: bool = False
    note: bool = False
    instead: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
@with_config(NO_OTHER_KEYS)
class Sign:
    """A row of signs.toml. The fields are explained there."""

    sentence: str
    remedy: str
    sure: Sure
    in_words: str = ""
    said: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()


@functools.cache
def messages() -> dict[str, Message]:
    """Return the rows of tracebacks.toml."""
    table = read_table(TRACEBACKS, dict[str, Message], Message)
    return {id: replace(row, pattern=exit_codes.filled(row.pattern)) for id, row in table.items()}


@functools.cache
def _over_lines(pattern: str) -> re.Pattern:
    """Return a message's pattern that also fits where the message is wrapped."""
    parts = CLASS.split(pattern)
    parts[::2] = [re.sub(r" (?![*?+{])", r"\\s+", part) for part in parts[::2]]
    return re.compile("".join(parts), re.MULTILINE)


@functools.cache
def rows() -> dict[str, Sign]:
    """Return the rows of signs.toml."""
    return read_table(SIGNS, dict[str, Sign], Sign)


def sign(id: str, text: str, place: int, **values: Any) -> Seen:
    """Return what signs.toml says of something that a rule found at a place of a text."""
    row = rows()[id]
    sentence, remedy = row.sentence.format(**values), row.remedy.format(**values)
    return Seen(id, sentence, remedy, row.sure, "the line in the text", place=place, line=line_at(text, place))


def sign_in_words(id: str, text: str, said: str) -> Seen:
    """Return what signs.toml says of something of which a person's sentence speaks, without the numbers of a log."""
    row, place = rows()[id], max(text.find(said), 0)
    values = {"since": "", "beside": "", "norm": 2**0.5, "count": 2, "rate": "a lower learning rate", "faults": ""}
    sentence, remedy = (row.in_words or row.sentence).format(**values), row.remedy.format(**values)
    return Seen(id, sentence, remedy, row.sure, "the line in the text", place=place, line=line_at(text, place))


def errors(text: str) -> list[Seen]:
    """Return the errors that a text has: the first that happened comes first, and what follows from others last."""
    # Of the same length, without what stands before lines: of ranks, of quotations, of Rich's boxes.
    text = BEFORE.sub(lambda match: " " * len(match[0]), text)
    found = {}
    for id, message in messages().items():
        first = itertools.islice(_over_lines(message.pattern).finditer(text), MOST_MATCHES)
        matches = [each for each in first if not ACCEPTED.match(text, each.end())]
        if not matches or not re.search(message.also, text) or re.search(message.without, text):
            continue
        match = matches[0]
        remedy = message.instead.get(match.groupdict().get("word", ""), message.remedy)
        words = _filled(message.sentence, match), _filled(remedy, match)
        found[id] = _seen(id, *words, place=match.start(), line=_printed(text, matches))
    last, place = LAST.search(text), max((seen.place for seen in found.values()), default=-1)
    if last and place <= text.rfind("\n", 0, last.start()):  # nothing is known in that line
        found = {seen.id: seen for seen in _cut(text, last)} | found
    hidden = {other for id in found for other in messages()[id].hides}
    told = [_as_cause(seen, found) for id, seen in found.items() if id not in hidden]
    return sorted(told, key=lambda seen: (seen.follows, seen.place))


@functools.lru_cache
def follows(line: str) -> bool:
    """Whether the line of an error tells of a consequence of another one."""
    return any(row.follows and _over_lines(row.pattern).search(line) for row in messages().values())


def _cut(text: str, last: re.Match) -> Iterator[Seen]:
    """Yield the one message that the last line of a text begins, and ends within."""
    shares = {}
    for id, message in messages().items():
        for words in BEGINS.findall(message.pattern):
            words = words.replace("\\x27", "'").replace("\\", "").removeprefix(last["name"])
            begins, goes_on = words.startswith(last["said"]), len(words) >= 20 and last["said"].startswith(words)
            if (begins or goes_on) and re.search(message.also, text):
                shares[id] = len(last["said"]) / len(words) if begins else 0
    # Of those that the whole line would tell apart the one that says least is true of all.
    ids = [id for id in shares if shares.keys().isdisjoint(messages()[id].hides)]
    if len(ids) == 1 and shares[ids[0]] > SHOWN:
        message, place = messages()[ids[0]], last.start()
        sentence = re.sub(r" \(\{\w+\}[^()]*\)", "", message.sentence)  # without what the line would have named
        if not re.search(r"\{\w+\}", sentence + message.remedy):
            seen = _seen(ids[0], sentence, message.remedy, place, line_at(text, place))
            yield replace(seen, sure=max(seen.sure, "likely", key=ORDER.index))


def _seen(id: str, sentence: str, remedy: str, place: int, line: str) -> Seen:
    """Return what a row of tracebacks.toml means in a text."""
    row = messages()[id]
    return Seen(
        id,
        sentence,
        remedy,
        row.sure,
        row.evidence,
        who=row.who,
        fault=row.fault,
        follows=row.follows,
        note=row.note,
        place=place,
        line=line,
    )


def _as_cause(seen: Seen, found: Collection[str]) -> Seen:
    """Return a line of trainings that are well as a cause, beside a message that it explains."""
    return replace(seen, note=seen.note and {*found}.isdisjoint(messages()[seen.id].hides))


def _printed(text: str, matches: list[re.Match]) -> str:
    """Return the first line of a message that is no source, which a traceback shows before it."""
    lines = [line_at(text, match.start()) for match in matches]
    return next((line for line in lines if not line.startswith(("raise ", "assert "))), lines[0])


def _filled(sentence: str, match: re.Match) -> str:
    """Return a sentence with what the message names. Other braces in it are those of configs."""
    for name, value in match.groupdict().items():
        sentence = sentence.replace(f"{{{name}}}", value or "?")
    return sentence


def line_at(text: str, place: int) -> str:
    """Return the line of a text at a place, short. A long one begins with a whole word near that place."""
    begin = text.rfind("\n", 0, place) + 1
    end = text.find("\n", place)
    near = place - LONGEST // 2
    if begin < near:
        begin = max(text.rfind(" ", begin, near) + 1, near - LONGEST)  # of a line without spaces
    line = " ".join(text[begin : end if end >= 0 else len(text)].split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."
