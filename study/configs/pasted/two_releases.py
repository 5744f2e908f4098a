"""Two releases of one package in a text, and which of them works, by the words in the clause of each."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.version import Version

from study.configs.pasted.words import meets, sentences
from study.known import lists
from study.known.faults import Fault, table

FROM_TO = r"\b{}\b[^\n]{{0,40}}?\bfrom v?(\d[\w.]*\w)\s*(?:to|->|\u2192)\s*v?(\d[\w.]*\w)"
# Who writes of ZeRO and names no package means DeepSpeed.
ZERO = re.compile(r"(?i)\bzero[ _-]?(?:stage)?[ _-]?[1-3]\b")
BARE = re.compile(r"(?a)(?<![\w.=-])v?(\d+\.\d+\.\d+(?:\.?(?:post|rc|dev)\d+)?)(?!\w|\.\d|%)")
CLAUSE = re.compile(r"[,;\n\uff0c\u3002]|\.\s|\b(?:but|while|whereas|and|however)\b")
WORKS = ("works",)
BROKEN = (
    "not works",
    "broken",
    "hang",
    "nan",
    "oom",
    "slow",
    "differ",
    "jump",
    "error/errors/exception",
    "crash/crashes",
)
MOST = 20_000  # characters that are read: what a person writes of releases stands at the beginning


@dataclass(frozen=True)
class Apart:
    """Two releases of a package, of which a text says that one works and the other does not."""

    works: Version
    broken: Version


def two_releases(text: str) -> dict[str, Apart]:
    """Return the two releases of each package of which a text says that one works and one does not."""
    text = text[:MOST]
    found = {}
    for word, name in table().packages.items():
        names = rf"(?:{re.escape(word)}|zero[ _-]?[123])" if name == "deepspeed" else re.escape(word)
        if match := re.search(FROM_TO.format(names), text, re.IGNORECASE):
            old, new = map(lists.release_of, match.groups())
            if isinstance(old, Version) and isinstance(new, Version):
                found[name] = Apart(old, new)
    for name, releases in _named(text).items():
        if name not in found and (apart := _apart(text, releases)):
            found[name] = apart
    return found


def _named(text: str) -> dict[str, set[Version]]:
    """Return the releases of each package; a number without a name is that of the one package in its line."""
    named = {
        name: {release for release in several if isinstance(release, Version) and len(release.release) > 2}
        for name, several in lists.named(text).items()
    }
    for line in text.splitlines():
        packages = {name for word, name in table().packages.items() if re.search(rf"(?ia)\b{re.escape(word)}\b", line)}
        if not packages and ZERO.search(line):
            packages = {"deepspeed"}
        if len(packages) == 1:
            named.setdefault(packages.pop(), set()).update(map(Version, BARE.findall(line)))
    return {name: releases for name, releases in named.items() if len(releases) > 1}


def _apart(text: str, releases: set[Version]) -> Apart | None:
    """Return the nearest two of which one works and one does not."""
    verdicts = {release: _works(text, release) for release in releases}
    good = [release for release, works in verdicts.items() if works]
    bad = [release for release, works in verdicts.items() if works is False]
    others = [release for release in releases if release not in good and release not in bad]
    if len(others) == 1 and bool(good) != bool(bad):
        good, bad = good or others, bad or others
    places = {release: place for place, release in enumerate(sorted(releases))}
    pairs = [(abs(places[a] - places[b]), a, b) for a in good for b in bad]
    if not pairs:
        return None
    _, works, broken = min(pairs)
    return Apart(works, broken)


def _works(text: str, release: Version) -> bool | None:
    """Whether a text says of a release that it works. None: it does not say, or says both."""
    said = set()
    for clause in _clauses(text, str(release)):
        words = sentences(clause)
        if meets(BROKEN, words):
            said.add(False)
        elif meets(WORKS, words):
            said.add(True)
    return said.pop() if len(said) == 1 else None


def _clauses(text: str, release: str) -> Iterator[str]:
    for match in re.finditer(rf"(?a)(?<![\w.]){re.escape(release)}(?!\w|\.\d)", text):
        begin = max((end.end() for end in CLAUSE.finditer(text, max(0, match.start() - 200), match.start())), default=0)
        end = CLAUSE.search(text, match.end())
        yield text[max(begin, match.start() - 200) : end.start() if end else match.end() + 200]


def came_between(package: str, apart: Apart) -> list[Fault]:
    """Return the known faults that the release which does not work has, and the other has not."""
    of_package = (fault for fault in table().fault if fault.package == package)
    return [fault for fault in of_package if fault.has(apart.broken) and fault.has(apart.works) is False]
