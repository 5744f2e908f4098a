"""Read what people write, word by word: inflections, typing errors and synonyms become one word, of words.toml.

A condition such as `loss/norm + not fall` is met by a sentence that has all its parts, joined by +, in any order, among
words that stand near each other. Words of a part follow each other, with at most two and no comma between; / stands
between words of which one is enough.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from study.core.files import load

WORDS = Path(__file__).with_name("words.toml")
NEAR = 12  # words among which all parts are: those of a long sentence speak of several things
BETWEEN = 2  # words between two that follow each other
SHORTEST = 6  # letters of a word in which a typing error is looked for: shorter ones have too many neighbours
# The name of a method, and no number.
ZERO = re.compile(r"\bZeRO\b(?:[ -]*(?:stage)?[ -]*[0-3]\b)?|\b(?i:zero)[ _-]*(?i:stage)?[ _-]*[0-3](?!\d)")
END = re.compile(r"[.!?;]\s|[\n\u3002\uff01\uff1f\uff1b]")
TOKEN = re.compile(r"[a-z][a-z0-9_]*|\d+(?:,\d{3})*\.?\d*(?:e-?\d+)?|[=:,\uff0c\u3001]")
COMMAS = {",", "\uff0c", "\u3001"}
CHINESE = re.compile("[\u4e00-\u9fff]")


@dataclass(frozen=True)
class Sentence:
    text: str
    words: tuple[str, ...]  # of the table, or as they are written


def sentences(text: str) -> tuple[Sentence, ...]:
    """Return the sentences of a person, in words of the table."""
    parts = dict.fromkeys(part.strip() for part in END.split(ZERO.sub(" deepspeed ", text)))
    return tuple(Sentence(part, _words(part)) for part in parts if part)


def meets(conditions: Sequence[str], said: Iterable[Sentence]) -> str | None:
    """Return the first sentence that meets one of the conditions."""
    asked = [_parts(condition) for condition in conditions]
    for sentence in said:
        near = [*_near(sentence.words)]
        if any(all(_has(words, part) for part in parts) for words in near for parts in asked):
            return sentence.text
    return None


def _near(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for begin in range(max(1, len(words) - NEAR + 1)):
        yield words[begin : begin + NEAR]


def _words(sentence: str) -> tuple[str, ...]:
    text = sentence.lower().replace("\u2019", "'").replace("n't", " not")
    several, _, _ = forms()
    text = several.sub(lambda match: f" {_of(' '.join(match[0].split()))} ", text)
    return tuple(map(_of, TOKEN.findall(text)))


@functools.cache
def forms() -> tuple[re.Pattern, dict[str, str], dict[str, str]]:
    """Return the forms of several words, and the word of each form and of each beginning."""
    whole: dict[str, str] = {}
    begins: dict[str, str] = {}
    remedy = 'write each row as: word = "its forms, by commas, beginni*"'
    table = load(WORDS, dict[str, str], what="a table that commands can read", remedy=remedy, most_bytes=2**20)
    for word, forms in table.items():
        whole[word] = word
        for form in forms.split(", "):
            (begins if form.endswith("*") else whole)[form.removesuffix("*")] = word
    several = sorted((form for form in whole | begins if not form.isidentifier() or CHINESE.search(form)), reverse=True)
    patterns = [
        re.escape(form) if CHINESE.search(form) else rf"\b{re.escape(form)}" + (r"\w*" if form in begins else r"\b")
        for form in several
    ]
    return re.compile("|".join(patterns).replace(r"\ ", r"\s+")), whole, begins


@functools.lru_cache(2**14)
def _of(token: str) -> str:
    """Return the table's word for a token, also with one letter wrong; else a number as %g, or the token."""
    if token[0].isdigit():
        return _number(token)
    _, whole, begins = forms()
    if token in whole:
        return whole[token]
    fitting = [form for form in begins if token.startswith(form)]
    if fitting:
        return begins[max(fitting, key=len)]
    if len(token) >= SHORTEST and token.isalpha():
        for form, word in (whole | begins).items():
            size = len(form)
            starts = {token[:size], token[: size - 1], token[: size + 1]} if form in begins else {token}
            if size >= SHORTEST and any(_one_slip(form, start) for start in starts):
                return word
    return token


def _number(token: str) -> str:
    try:
        return f"{float(token.replace(',', '')):g}"
    except ValueError:
        return token


def _one_slip(right: str, typed: str) -> bool:
    """Whether one letter behind the first is missing, too many, another, or changed places with the next."""
    if right[0] != typed[:1] or abs(len(right) - len(typed)) > 1 or right == typed:
        return False
    same = next((n for n, (a, b) in enumerate(zip(right, typed, strict=False)) if a != b), min(len(right), len(typed)))
    after, later = right[same:], typed[same:]
    swapped = after[1:2] + after[:1] + after[2:] == later
    return swapped or after[1:] == later[1:] or after[1:] == later or after == later[1:]


@functools.cache
def _parts(condition: str) -> tuple[tuple[frozenset[str], ...], ...]:
    return tuple(
        tuple(frozenset(word.split("/")) for word in part.replace(" / ", "/").split())
        for part in condition.split(" + ")
    )


def _has(words: tuple[str, ...], part: tuple[frozenset[str], ...]) -> bool:
    places = {place for place, word in enumerate(words) if word in part[0]}
    for wanted in part[1:]:
        places = {later for place in places for later in _next(words, place) if words[later] in wanted}
    return bool(places)


def _next(words: tuple[str, ...], place: int) -> Iterator[int]:
    """Yield the places that follow one, up to a comma."""
    for later in range(place + 1, min(place + 2 + BETWEEN, len(words))):
        if words[later] in COMMAS:
            return
        yield later
