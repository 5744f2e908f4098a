"""Read which releases of libraries a list, a project, a lock or a thread names."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from study.conform.faults import ANY, Release, table
from study.core import files, machine
from study.core.errors import Stop, nearest

MAX_BYTES = 8 * 2**20  # of a lock


def releases(words: tuple[str, ...]) -> dict[str, Release]:
    """Return the releases that files or words name, of the packages of the table; without words, those installed."""
    found = dict[str, Release]()
    for word in words or [f"{name} {machine.version(name) or ''}" for name in table().asked]:
        text = word
        if os.path.isfile(word):  # noqa: PTH113  a list in quotes is longer than a name can be, where pathlib raises
            text = files.read(Path(word), MAX_BYTES).decode(errors="replace")
        found |= (named := listed(text))
        if text == word and ANY in named.values() and re.fullmatch(r"[\w.-]+==\S*", word):
            raise Stop(f"{word!r:.80} names no release", "write one, such as deepspeed==0.19.8")
        # Another package is no mistake beside known ones, as in a list. A misspelt word is one.
        if not named and "==" not in word:
            raise _names_none(word)
    if not found:
        raise _names_none(words[0])
    return found


def _names_none(word: str) -> Stop:
    known = sorted({*table().packages.values()}, key=str.lower)
    what = f"{word!r:.80} is no file, and names none of {', '.join(known)}"
    remedy = "write releases such as deepspeed==0.19.8, or name a list of them"
    return Stop(what, nearest(word.partition("==")[0], known, otherwise=remedy))


def notes(words: tuple[str, ...], used: dict[str, Release]) -> Iterator[str]:
    """Yield a sentence for each release beyond those that were asked, and for each of another package."""
    for name, releases in table().asked.items():
        release = used.get(name)
        if not isinstance(release, Version):
            continue
        if release > Version(releases[-1]):
            yield f"{name} {release} is later than {releases[-1]}, the newest that was tested."
        elif release < Version(releases[0]):
            yield f"{name} {release} is earlier than {releases[0]}, the oldest that was tested."
    others = {*table().packages.values()} - used.keys()
    for word in words:
        name, sign, _ = word.partition("==")
        if sign and not listed(word):
            yield f"Of {word} the table has no fault: {nearest(name, others, otherwise='it knows no such package.')}"


def listed(text: str) -> dict[str, Release]:
    """Return the releases that a text names. Where it names several of a package, it is not known which one is used."""
    patterns = table().patterns
    text = re.sub(patterns["comment"], "", text.lower())
    found: dict[str, set[Release]] = {}
    for name, said in re.findall(patterns["locked"], text) or re.findall(patterns["listed"], text):
        named = found.setdefault(table().packages[name], set())
        named |= {release_of(said)} - {ANY}
    return {name: several.pop() if len(several) == 1 else ANY for name, several in found.items()}


def release_of(said: str) -> Release:
    """Return the release or range that a text says; any, if it says none."""
    with contextlib.suppress(ValueError):  # as packaging raises for 2.x
        if said[:1].isdigit():
            return SpecifierSet(f"=={said}") if "*" in said else Version(said)
        # Poetry's own signs: ^ keeps the first number that is not 0, ~ all but the last.
        said = re.sub(r"[~^]0\.\d+(?![.\d])", r"\g<0>.0", said)
        return SpecifierSet(re.sub(r"~(?!=)|\^(?=0)", "~=", said).replace("^", ">="))
    return ANY
