"""Read which releases of libraries a list, a project, a lock or a thread names."""

import re
from pathlib import Path

from study.conform.faults import ANY, Release, release_of, table
from study.core import files, machine
from study.core.errors import Stop

MAX_BYTES = 8 * 2**20  # of a lock


def releases(words: tuple[str, ...]) -> dict[str, Release]:
    """Return the releases that files or words name, of the packages of the table; without words, those installed."""
    found = dict[str, Release]()
    others = []
    for word in words or [f"{name} {machine.version(name) or ''}" for name in table().asked]:
        text = files.read(Path(word), MAX_BYTES).decode(errors="replace") if Path(word).is_file() else word
        found |= (named := listed(text))
        if not named:
            others.append(word)
    # Another package beside known ones is no mistake, as in a list. A misspelt word is one.
    wrong = [word for word in others if not found or not re.fullmatch(r"[\w.-]+==[\w.]+", word)]
    if wrong:
        known = ", ".join(sorted({*table().packages.values()}))
        raise Stop(
            f"{wrong[0]!r:.80} is no file, and names none of {known}",
            "write releases such as deepspeed==0.19.8, or name a list of them",
        )
    return found


def listed(text: str) -> dict[str, Release]:
    """Return the releases that a text names. Where it names several of a package, it is not known which one is used."""
    patterns = table().patterns
    text = re.sub(patterns["comment"], "", text.lower())
    found: dict[str, set[Release]] = {}
    for name, said in re.findall(patterns["locked"], text) or re.findall(patterns["listed"], text):
        named = found.setdefault(table().packages[name], set())
        named |= {release_of(said)} - {ANY}
    return {name: several.pop() if len(several) == 1 else ANY for name, several in found.items()}
