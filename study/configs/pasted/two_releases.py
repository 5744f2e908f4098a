"""Two releases of one package in a text, and which of them works, by the words in the clause of each."""

import contextlib
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from study.configs.pasted.words import meets, only, sentences
from study.known import lists
from study.known.faults import Fault, of_package, table

FROM_TO = r"\b{}\b[^\n]{{0,40}}?\bfrom v?(\d[\w.]*\w)\s*(?:to|->|\u2192)\s*v?(\d[\w.]*\w)"
# "The loss rises from 0.9 to 1.4" names no releases: of two parts they are ones beside such a word alone.
UPGRADED = re.compile(r"(?i)upgrad|updat|downgrad|bump|version|releas|mov(?:e|ed|ing)\b|switch|\u5347\u7ea7")
# Who writes of ZeRO and names no package means DeepSpeed.
SPELLED = {"deepspeed": "(?:deepspeed|zero[ _-]?[123])"}
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
LONGEST = 200  # characters of a clause on each side
MOST = 20_000  # characters that are read: what a person writes of releases stands at the beginning


@dataclass(frozen=True)
class Apart:
    """Two releases of a package, of which a text says that one works and the other does not."""

    works: Version
    broken: Version


def two_releases(text: str) -> dict[str, Apart]:
    """Return the two releases of each package of which a text says that one works and one does not."""
    text = text[:MOST]
    by_verdict = {name: _nearest(_verdicts(text, releases)) for name, releases in _named(text).items()}
    return _upgrades(text) | {name: apart for name, apart in by_verdict.items() if apart}


def _upgrades(text: str) -> dict[str, Apart]:
    """Return the releases of packages that were upgraded from one to another."""
    found = {}
    for word, name in table().packages.items():
        match = re.search(FROM_TO.format(SPELLED.get(word, re.escape(word))), text, re.IGNORECASE)
        if match is None or not _are_releases(text, match):
            continue
        with contextlib.suppress(InvalidVersion):
            found[name] = Apart(*map(Version, match.groups()))
    return found


def _are_releases(text: str, match: re.Match) -> bool:
    """Whether two numbers are releases: they have three parts, or stand beside a word for an upgrade."""
    has_three_parts = any(number.count(".") > 1 for number in match.groups())
    return has_three_parts or bool(UPGRADED.search(text, max(0, match.start() - 40), match.start(1)))


def _named(text: str) -> dict[str, set[Version]]:
    """Return the releases of each package; a number without a name is that of the one package in its line."""
    named: dict[str, set[Version]] = defaultdict(set)
    for name, several in lists.named(text).items():
        named[name] |= {release for release in several if isinstance(release, Version) and len(release.release) > 2}
    for line in text.splitlines():
        bare = BARE.findall(line)
        if bare and (package := _package_of(line)):
            named[package] |= {*map(Version, bare)}
    return named


def mentioned(text: str) -> set[str]:
    """Return the packages of the table that a text names."""
    return {name for word, name in table().packages.items() if re.search(rf"(?ia)\b{re.escape(word)}\b", text)}


def _package_of(line: str) -> str | None:
    """Return the one package that a line names."""
    packages = mentioned(line)
    return "deepspeed" if not packages and ZERO.search(line) else only(packages)


def _verdicts(text: str, releases: set[Version]) -> dict[Version, bool | None]:
    """Return whether each release works. The one of which nothing is said does what the others do not."""
    verdicts = {release: _works(text, release) for release in sorted(releases)}
    unknown = only({release for release, works in verdicts.items() if works is None})
    told = only({*verdicts.values()} - {None})
    if unknown and told is not None:
        verdicts[unknown] = not told
    return verdicts


def _nearest(verdicts: dict[Version, bool | None]) -> Apart | None:
    """Return the nearest two of which one works and one does not. The releases are in their order."""
    order = [*verdicts]
    good = [release for release in order if verdicts[release] is True]
    bad = [release for release in order if verdicts[release] is False]
    pairs = itertools.starmap(Apart, itertools.product(good, bad))
    return min(pairs, key=lambda pair: abs(order.index(pair.works) - order.index(pair.broken)), default=None)


def _works(text: str, release: Version) -> bool | None:
    """Whether a text says of a release that it works. None: it does not say, or says both."""
    said = set()
    for clause in _clauses(text, str(release)):
        words = sentences(clause)
        if meets(BROKEN, words):
            said.add(False)
        elif meets(WORKS, words):
            said.add(True)
    return only(said)


def _clauses(text: str, release: str) -> Iterator[str]:
    """Yield what stands around a release, up to the ends of its clause."""
    for match in re.finditer(rf"(?a)(?<![\w.]){re.escape(release)}(?!\w|\.\d)", text):
        before = text[max(0, match.start() - LONGEST) : match.start()]
        end = CLAUSE.search(text, match.end())
        after = text[match.start() : end.start() if end else match.end() + LONGEST]
        yield CLAUSE.split(before)[-1] + after


def came_between(package: str, apart: Apart) -> list[Fault]:
    """Return the known faults that the release which does not work has, and the other has not."""
    faults = of_package(package)
    return [fault for fault in faults if (fault.has(apart.works), fault.has(apart.broken)) == (False, True)]
