"""Read which releases of libraries a list, a project, a lock or a thread names."""

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from study.core import files, machine
from study.core.errors import Stop
from study.known import patterns
from study.known.faults import ANY, Release, table

MAX_BYTES = 8 * 2**20  # of a lock
A_PATH = re.compile(r"[^\s=]*/[^\s=]*|[^\s=]*\.[a-z]\w{0,5}")  # a name with a folder or an ending
LONGEST = 100  # of a release or range
MOST_SHOWN = 4  # releases of a package


def releases(words: tuple[str, ...]) -> dict[str, Release]:
    """Return the releases that files or words name, of the packages of the table; without words, those installed."""
    words = words or tuple(f"{name} {machine.version(name) or ''}" for name in table().asked)
    several_of: dict[str, list[Release]] = {}
    for word in words:
        here = _releases_of(word)
        # Another package is no mistake beside known ones, as in a list. A misspelt word is one.
        if not here and "==" not in word:
            raise _names_none(word)
        for name, release in here.items():
            several_of.setdefault(name, []).append(release)
    if not several_of:
        raise _names_none(words[-1])
    has_run = ran("\n".join(map(content, words)))
    used = {}
    for name, several in several_of.items():
        used[name] = has_run.get(name, ANY) if differ(several) else agreed(several)
    return used


def _releases_of(word: str) -> dict[str, Release]:
    """Return the releases that a word names, or a file of that name. Raise Stop if it is meant for something else."""
    text = content(word)
    here = listed(text)
    is_file = text != word
    if not (is_file or here) and A_PATH.fullmatch(word):
        raise Stop(f"{word!r:.80} cannot be read: not there", "name a file that is here and lists releases")
    if is_config(text):
        raise Stop(f"{word:.80} is a config", f"give it as --config {word:.80}")
    if not is_file and ANY in here.values() and re.fullmatch(r"[\w.-]+==\S*", word):
        raise Stop(f"{word!r:.80} names no release", "write one, such as deepspeed==0.19.8")
    return here


def is_config(text: str) -> bool:
    """Whether a text is the config of a training, and lists no release."""
    return bool(patterns.CONFIG.search(text)) and not {*listed(text).values()} - {ANY}


def is_whole_list(text: str) -> bool:
    """Whether each line of a text names a package, as in a list of requirements: what is not there is not used."""
    lines = text.strip().splitlines()
    is_list = len(lines) > 1 and all(map(patterns.OF_LIST.match, lines))
    return is_list and not patterns.INCLUDED.search(text)


def _names_none(word: str) -> Stop:
    known = sorted(table().packages)
    what = f"{word!r:.80} names none of {', '.join(known)}, neither as a word nor as a file that is here"
    otherwise = "write releases such as deepspeed==0.19.8, or name a file that is here and lists them"
    return Stop(what, " ".join(misspelt(content(word), known).values()) or otherwise)


def ran(text: str) -> dict[str, Release]:
    """Return the releases that a log says it ran, of packages of which it says one."""
    several_of: dict[str, set[Release]] = {}
    for groups in patterns.RAN.findall(text.lower()):
        name, said = filter(None, groups)
        several_of.setdefault(table().packages[name], set()).add(release_of(said))
    return {name: several.pop() for name, several in several_of.items() if len(several) == 1}


def differ(several: Iterable[Release]) -> bool:
    """Whether several releases are named, of which one alone can be used."""
    return len({each for each in several if isinstance(each, Version)}) > 1


def agreed(several: list[Release]) -> Release:
    """Return the release that lists name, or the range that is left by all; any, where they contradict each other."""
    pins = set()
    ranges = ANY
    for each in several:
        if isinstance(each, Version):
            pins.add(each)
        else:
            ranges &= each
    if len(pins) > 1 or not _has_any(ranges, pins):
        return ANY
    return pins.pop() if pins else ranges


def _has_any(ranges: SpecifierSet, pins: set[Version]) -> bool:
    """Whether a range has one of these releases, or without them any at all."""
    # A range with releases has one of its bounds, or what follows one at once, or begins before all releases.
    near = [Version("0")]
    for each in ranges:
        bound = each.version.removesuffix(".*")
        near += [Version(bound), Version(f"{bound}.0.1")]
    return any(ranges.contains(each, prereleases=True) for each in pins or near)


def content(word: str) -> str:
    """Return the text of a file, or the word."""
    if files.is_file(word):
        return files.text_of(files.read(Path(word), MAX_BYTES))
    return word


def notes(words: tuple[str, ...], used: Mapping[str, Release]) -> Iterator[str]:
    """Yield a sentence for each name that may be misspelt, and for each word that is another package's."""
    said: dict[str, set[Release]] = {}
    for word in words:
        text = content(word)
        for name, several in named(text).items():
            said.setdefault(name, set()).update(several)
        yield from _not_read(word, text, " ".join(words))
        yield from _not_known(word, text, used)
    yield from _contradictions(said, used)


def _not_read(word: str, text: str, every: str) -> Iterator[str]:
    """Yield a sentence for each release that is not understood, and for each list that is included."""
    for name, release in dict.fromkeys(written(text)):
        if release and release_of(release) == ANY:
            yield f"Of {name} {release!r:.80} is written, which is not understood as a release."
    for name in patterns.INCLUDED.findall(text):
        if name not in every:
            yield f"{word:.80} includes {name:.80}, which was not read: give it as well."


def _not_known(word: str, text: str, used: Mapping[str, Release]) -> Iterator[str]:
    """Yield a sentence for each name that may be a misspelt one, and for a word that is another package's."""
    close = misspelt(text, [name for name, package in table().packages.items() if used.get(package, ANY) == ANY])
    for name, question in close.items():
        yield f"Of {name} the table has no fault: {question}"
    if "==" in word and not (close or listed(word)):
        known = ", ".join(sorted({*table().packages.values()}, key=str.lower))
        yield f"Of {word} the table has no fault: it is about {known} alone."


def _contradictions(said: dict[str, set[Release]], used: Mapping[str, Release]) -> Iterator[str]:
    for name, several in said.items():
        is_open = used[name] == ANY and several
        if is_open and len(several) == 1:
            yield f"Of {name} {next(iter(several))} is written: no release is in it. Correct it."
        elif is_open or differ(several):
            yield contradiction(name, several, used[name])


def contradiction(name: str, several: Iterable[Release], used: Release) -> str:
    """Return that several releases are named, and which one counts."""
    shown = sorted(map(str, several))
    named = " and ".join(shown) if len(shown) <= MOST_SHOWN else f"{len(shown)} releases"
    if used == ANY:
        return f"Of {name} {named} are named: which one is used is not known. Give that one alone."
    return f"Of {name} {named} are named: {used} counts, as the log says that it ran."


def misspelt(text: str, known: list[str]) -> dict[str, str]:
    """Return a question for each name in a list that is close to a known one.

    A real package may have such a name, as torchx.
    """
    questions = {}
    for name in patterns.REQUIRED.findall(text.lower()):
        near = difflib.get_close_matches(name, known, 1, 0.88)  # deepspede for deepspeed, not torchao for torch
        if near not in ([], [name]):
            questions[name] = f"did you mean {near[0]!r}?"
    return questions


def listed(text: str) -> dict[str, Release]:
    """Return the releases that a text names. Of several of a package the one counts that a log says it ran, or none."""
    has_run = ran(text)
    found: dict[str, Release] = {}
    for name, several in named(text).items():
        found[name] = next(iter(several)) if len(several) == 1 else has_run.get(name, ANY)
    return found


def named(text: str) -> dict[str, set[Release]]:
    """Return all releases that a text names of each package."""
    several_of: dict[str, set[Release]] = {}
    for name, said in written(text):
        releases = several_of.setdefault(name, set())
        releases |= {release_of(said)} - {ANY}
    return several_of


def written(text: str) -> list[tuple[str, str]]:
    """Return what a text writes behind each package, which is a release, a range, or nothing that is understood."""
    text = patterns.COMMENT.sub("", text.lower())
    pairs = patterns.LOCKED.findall(text) or patterns.LISTED.findall(text)
    return [(table().packages[name], said.strip(" \t.")) for name, said in pairs]


def release_of(said: str) -> Release:
    """Return the release or range that a text says; any, if it says none."""
    if len(said) > LONGEST:
        return ANY
    with contextlib.suppress(ValueError):  # as packaging raises for 2.x
        if said[:1].isdigit():
            return SpecifierSet(f"=={said}") if {*"*,"} & {*said} else Version(said)
        # Poetry's own signs: ^ keeps the first number that is not 0, ~ all but the last.
        said = re.sub(r"[~^]0\.\d+(?![.\d])", r"\g<0>.0", said)
        return SpecifierSet(re.sub(r"~(?!=)|\^(?=0)", "~=", said).replace("^", ">="))
    return ANY
