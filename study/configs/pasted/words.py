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
from typing import Self, TypeVar

from study.core.files import load

WORDS = Path(__file__).with_name("words.toml")
NEAR = 12  # words among which all parts are: those of a long sentence speak of several things
BETWEEN = r")(?: [^,\uff0c\u3001\s]+){0,2} (?:"  # two that follow each other: two words, and no comma
SHORTEST = 6  # letters of a word in which a typing error is looked for: shorter ones have too many neighbours
# The name of a method, and no number.
ZERO = re.compile(r"\bZeRO\b(?:[ -]*(?:stage)?[ -]*[0-3]\b)?|\b(?i:zero)[ _-]*(?i:stage)?[ _-]*[0-3](?!\d)")
END = re.compile(r"[.!?;]\s|[\n\u3002\uff01\uff1f\uff1b]")
TOKEN = re.compile(r"[a-z][a-z0-9_]*|\d+(?:,\d{3})*\.?\d*(?:e-?\d+)?|[=:,\uff0c\u3001]")
CHINESE = re.compile("[\u4e00-\u9fff]")
T = TypeVar("T")


@dataclass(frozen=True)
class Sentence:
    text: str
    words: tuple[str, ...]  # of the table, or as they are written


def sentences(text: str) -> tuple[Sentence, ...]:
    """Return the sentences of a person, in words of the table."""
    parts = dict.fromkeys(part.strip() for part in END.split(ZERO.sub(" deepspeed ", text)))
    return tuple(Sentence(part, _words(part)) for part in parts if part)


def only(values: set[T]) -> T | None:
    """Return the one thing that a text says. None: it says nothing, or several things."""
    return next(iter(values)) if len(values) == 1 else None


def meets(conditions: Sequence[str], said: Iterable[Sentence]) -> str | None:
    """Return the first sentence that meets one of the conditions."""
    asked = [*map(_patterns, conditions)]
    for sentence in said:
        whole = " ".join(sentence.words)  # has what words near each other have
        possible = [parts for parts in asked if all(part.search(whole) for part in parts)]
        if possible and any(
            all(part.search(near) for part in parts) for near in _near(sentence.words) for parts in possible
        ):
            return sentence.text
    return None


def _near(words: tuple[str, ...]) -> Iterator[str]:
    """Yield the words that stand near each other, with a space between."""
    for begin in range(max(1, len(words) - NEAR + 1)):
        yield " ".join(words[begin : begin + NEAR])


@functools.cache
def _patterns(condition: str) -> tuple[re.Pattern, ...]:
    """Return the pattern of each part, over words with a space between."""
    parts = condition.replace(" / ", "/").replace("/", "|").split(" + ")
    return tuple(re.compile(rf"(?<!\S)(?:{BETWEEN.join(part.split())})(?!\S)") for part in parts)


def _words(sentence: str) -> tuple[str, ...]:
    """Return the words of a sentence, of the table as far as it has them."""
    text = sentence.lower().replace("\u2019", "'").replace("n't", " not")
    text = forms().several.sub(lambda match: f" {_of(' '.join(match[0].split()))} ", text)
    return tuple(map(_of, TOKEN.findall(text)))


@dataclass(frozen=True)
class Forms:
    """The forms of words.toml, with the word of each."""

    several: re.Pattern  # forms of several words, and Chinese ones
    whole: dict[str, str]
    begins: dict[str, str]  # with any ending

    @classmethod
    def of(cls, table: dict[str, str]) -> Self:
        """Return the forms of a table: its words are forms of themselves."""
        whole: dict[str, str] = {}
        begins: dict[str, str] = {}
        for word, forms in table.items():
            for form in [word, *forms.split(", ")]:
                if form.endswith("*"):
                    begins[form.removesuffix("*")] = word
                else:
                    whole[form] = word
        ends = dict.fromkeys(whole, r"\b") | dict.fromkeys(begins, r"\w*")
        longest = sorted(ends, reverse=True)  # before those that it begins with
        chinese = [re.escape(form) for form in longest if CHINESE.search(form)]
        several = [form for form in longest if not (CHINESE.search(form) or form.isidentifier() or form.isdigit())]
        others = [re.escape(form).replace(r"\ ", r"\s+") + ends[form] for form in several]
        # With one \b before all of them, only those are tried that begin with the letter at a place: ten times as fast.
        return cls(re.compile("|".join([rf"\b(?:{'|'.join(others)})", *chinese])), whole, begins)


@functools.cache
def forms() -> Forms:
    """Return the forms of words.toml."""
    remedy = 'write each row as: word = "its forms, by commas, beginni*"'
    return Forms.of(load(WORDS, dict[str, str], what="a table that commands can read", remedy=remedy, most_bytes=2**20))


@functools.lru_cache(2**14)
def _of(token: str) -> str:
    """Return the table's word for a token, also with one letter wrong; else a number as %g, or the token."""
    known = forms()
    if token in known.whole:
        return known.whole[token]
    if token[0].isdigit():
        return f"{float(token.replace(',', '')):g}"
    if fitting := [form for form in known.begins if token.startswith(form)]:
        return known.begins[max(fitting, key=len)]
    return _with_a_slip(token) if len(token) >= SHORTEST and token.isalpha() else token


def _with_a_slip(token: str) -> str:
    """Return the word of the first form that is one letter away; else the token."""
    known = forms()
    for form, word in known.whole.items():
        if form[0] == token[0] and len(form) >= SHORTEST and _one_slip(form, token):
            return word
    for form, word in known.begins.items():
        if form[0] == token[0] and len(form) >= SHORTEST and _begins_with_a_slip(form, token):
            return word
    return token


def _begins_with_a_slip(form: str, token: str) -> bool:
    """Whether the slip is inside the form: at its end another word begins, such as install for instability."""
    starts = (token[: len(form) + more] for more in (-1, 0, 1))
    return any(start.endswith(form[-1]) and _one_slip(form, start) for start in starts)


def _one_slip(right: str, typed: str) -> bool:
    """Whether one letter behind the first, which both have, is missing, too many, or changed places with the next.

    Another letter in its place mostly makes another word: convert is no converge, and instance no instability.
    """
    if abs(len(right) - len(typed)) > 1 or right == typed:
        return False
    same = 1
    while right[same : same + 1] == typed[same : same + 1]:
        same += 1
    after, later = right[same:], typed[same:]
    swapped = after[1:2] + after[:1] + after[2:]
    return later in (swapped, after[1:]) or later[1:] == after
