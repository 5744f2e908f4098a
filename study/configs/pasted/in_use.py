"""Leave out of a remedy what the text says is in use, was tried, or cannot be on its machine: in_use.toml."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import with_config

from study.configs.pasted.read import Pasted
from study.configs.pasted.tracebacks import Seen
from study.core.tables import NO_OTHER_KEYS, Regex, read_table

IN_USE = Path(__file__).with_name("in_use.toml")
FLAGS = re.IGNORECASE | re.ASCII
# Between the items of a remedy. Commas of a call or a command separate none, nor does "stages 1 and 2".
BETWEEN = r"; |, (?:or|and) |, | \(|\)|(?<!\d) (?:or|and) | (?:or|and) (?!\d)"
JOINT = r"(?:, (?:or|and) |, | (?:or|and) )"  # within a clause
ASIDE = r" \((?:[^()]|\([^()]*\))*\)"
PART = re.compile(rf"(?P<between>{BETWEEN})|(?:`[^`]*`|-c '[^']*'|\w\((?:[^()]|\([^()]*\))*\)|(?!{BETWEEN})[\s\S])+")
SETTING = re.compile(r"(?<![\w.])(\w+_\w+)(?:=|: | to )[\"']?(\w+)")
REFUSED = re.compile(r"\b(?:unset|not|leave|remove|without)\b")  # what is set is the mistake
# Messages advise ("try setting ..."), and people ask; who tried it says so.
ADVICE = re.compile(
    r"(?i)\b(?:try|can|could|may|please|should|must|consider|(?:need|want) to|recommend\w*|by setting|pass(?:ing)?)\b"
    r"(?![\s\S]*\b(?:(?:i|we) (?:use|set|have|am|are)|tried|already)\b)"
)
SENTENCE = re.compile(r"[.;!?]\s|\n\s*[-*>$\n]")
NEAR = 100  # characters before
HALF = re.compile(r"(?:else )?if\b[^,:]*|[^:,]*:")  # a clause of which the condition alone is left
NOTHING_LEFT = "what usually helps is in use here already: paste the whole Traceback and the list of `pip freeze`"


@dataclass(frozen=True)
@with_config(NO_OTHER_KEYS)
class InUse:
    """A row of the table. The fields are explained there."""

    advice: Regex
    text: Regex = ""
    said: dict[str, list] = field(default_factory=dict)
    instead: str = ""

    def fits(self, pasted: Pasted) -> bool:
        """Whether a text says it."""
        is_said = all(pasted.said.get(condition) in values for condition, values in self.said.items())
        return is_said and _is_in_use(self.text, pasted.text)


@functools.cache
def rows() -> dict[str, InUse]:
    """Return the rows of in_use.toml."""
    return read_table(IN_USE, dict[str, InUse], InUse)


def without_what_is_in_use(seen: Seen, pasted: Pasted) -> Seen:
    """Return what a text shows, with a remedy that has nothing of which the text says that it is in use."""
    fitting = [row for row in rows().values() if row.fits(pasted)]
    items = [match[0] for match in PART.finditer(seen.remedy) if not match["between"]]
    places = {item: place for item in items if (place := _place(item, fitting, pasted.text)) is not None}
    if not places:
        return seen
    instead = [row.instead for row in fitting if any(re.search(row.advice, item, FLAGS) for item in places)]
    remedy = "; ".join(filter(None, [*instead, _without(seen.remedy, places)]))
    return replace(seen, remedy=remedy or NOTHING_LEFT)


def _place(item: str, fitting: Sequence[InUse], text: str) -> int | None:
    """Return where an item of a remedy advises what is in use. None: it does not."""
    if REFUSED.search(item):
        return None
    for row in fitting:
        if match := re.search(row.advice, item, FLAGS):
            return match.start()
    settings = [*SETTING.finditer(item)]
    is_set = [_is_set(match[1], match[2], text) for match in settings]
    return settings[0].start() if settings and all(is_set) else None


def _is_set(key: str, value: str, text: str) -> bool:
    """Whether a text has a setting with this value."""
    return _is_in_use(rf"\b{key}[\"']?(?:\s*(?:[:=]|\.{{3,}})\s*| (?:to )?)[\"']?{value}\b", text)


def _is_in_use(pattern: str, text: str) -> bool:
    """Whether a text has something, and not as the advice of a message or as a question."""
    for match in re.finditer(pattern, text, FLAGS):
        sentence = SENTENCE.split(text[max(match.start() - NEAR, 0) : match.start()])[-1]
        if not ADVICE.search(sentence):
            return True
    return False


def _without(remedy: str, places: dict[str, int]) -> str:
    """Return a remedy without items from their places on, and without what stood between them and the next."""
    kept = "".join(_kept(match[0], places) for match in PART.finditer(remedy))
    kept = re.sub(rf"(?! )(?:(?!{BETWEEN})[^;()])*: \0(?=[;)]|$)", "\0", kept)
    kept = re.sub(rf" \(\0(?:(?:; |{JOINT})\0)*\)", "", kept)
    kept = re.sub(rf"\0{ASIDE}(?:(?!{BETWEEN}).)*", "\0", kept)
    kept = re.sub(rf"(?<!: )(?:{JOINT}|; (?=\0[;)]))\0", "", kept)
    kept = re.sub(rf"\0{JOINT}?", "", kept)
    clauses = [clause.strip() for clause in kept.split("; ")]
    whole = "; ".join(clause for clause in clauses if clause and not HALF.fullmatch(clause))
    return re.sub("^(?:else|or|and) ", "", whole)


def _kept(part: str, places: dict[str, int]) -> str:
    """Return what is kept of a part of a remedy: of an item that is cut, what stands before a colon."""
    if part not in places:
        return part
    before, colon, _ = part[: places[part]].rpartition(": ")
    return f"{before}{colon}\0"
