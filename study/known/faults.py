"""The faults of libraries that we know, and in which releases: faults.toml, read into types. Needs no torch.

The ledger, `study diagnose`, `study conform`, `study stack` and the report read it.
"""

import functools
import re
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field, computed_field, model_validator

from study.core.errors import nearest
from study.core.files import load
from study.core.tables import Evidence
from study.known.conditions import Values, wrong_condition, wrong_keys, wrong_release, wrong_script

TABLE = Path(__file__).with_name("faults.toml")
# Words of a symptom that are not in [symptoms]: "losses", and what they are (configs/pasted/ranking.py asks for nan).
MORE_WORDS = ("losses", "nan")
FACTOR = re.compile(r"[x/] ([Ng]|\d[\d,]*)")  # by which a value is wrong: N ranks, g micro-batches, or a number
Names = Annotated[tuple[str, ...], Field(strict=False)]
Release = Version | SpecifierSet  # a range
ANY = SpecifierSet()  # release
version = functools.cache(Version)  # the table has few, and an answer compares thousands
# Conditions, by the names of flags: a number is the least, of a list one must fit. What is not said does not matter.
When = dict[str, bool | int | str | list | dict]


class Fault(BaseModel):
    """Something that releases of a library do wrong, when, what to do about it, and what shows it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    id: str
    package: str
    kind: Literal["known bug", "new finding", "documented difference"]
    sentence: str
    why: str = ""  # at length, with threads
    since: str  # the first release with the fault, of those that were asked
    until: str  # the last one
    releases: str  # the range in words, and which are right
    asked: Names = ()  # that were run or read for it; empty: all of the package at the head of faults.toml
    # The range: kept answers of the suite, a run of the last bad and of the first good release, a script, or reading.
    rests_on: Literal["tests of study conform", "two runs", "script", "runs on a GPU", "sources, not run"]
    when: When | None = None  # None: it is none of a training
    ask: dict[str, str] = {}  # by condition: better words than those of the table
    who: str = ""  # is hit, because a trainer forces it
    forced: dict[str, str] = {}  # by trainer: the releases that make the training reentrant, whatever the user gives
    symptom: str = ""  # names of [symptoms], with a factor: "norm / g"; several with commas
    do: str = ""
    do_with: dict[str, str] = {}  # by trainer, where `do` cannot be followed
    script: str = ""  # in reproductions/
    upstream: Evidence | Literal[""] = ""
    nearest: bool = False  # `upstream` is the nearest thread, and none is about the cause: so of each new finding
    gpu: Literal["yes", "no", "unknown"]  # does it take the same path
    adapters: Names = ()  # of study conform, with the properties that see it
    properties: Names = ()
    # --- for the ledger: what the script finds, and how sure that is
    value: float | int | str | bool | None = None
    found: str = ""
    certainty: Literal["", "high", "moderate", "low"] = ""
    because: str = ""

    def contains(self, release: Version) -> bool:
        return version(self.since) <= release <= version(self.until)

    def has(self, release: Release) -> bool | None:
        """Whether a release has the fault. None: it was not asked, and the one before or after it has.

        Of a range: True if all tested releases in it have it, False if none in it can. Its ends count as well: releases
        from 5.0 on are more than 5.23.0, the first that was tested.
        """
        if isinstance(release, SpecifierSet):
            return self._has_all(release)
        beside = self.beside(release)
        if not any(map(self.contains, beside)):
            return False
        return release in beside or None

    @functools.cached_property
    def tested(self) -> list[Version]:
        """The releases that were asked for it, from the oldest on: an answer looks there some thousand times."""
        return sorted(map(version, self.asked or table().asked[self.package]))

    @functools.cached_property
    def ever_tested(self) -> set[Version]:
        """The same, with those that were asked for most faults of the package."""
        return {*self.tested, *map(version, table().asked.get(self.package, ()))}

    def beside(self, release: Version) -> list[Version]:
        """Return the tested releases nearest to one: itself, or the one before and the one after it."""
        not_newer = bisect_right(self.tested, release)
        before = self.tested[:not_newer][-1:]
        if release in before:
            return before
        return before + self.tested[not_newer:][:1]

    def inferred(self, release: Version) -> bool | None:
        """Whether a release has the fault, where it was not asked by those before and after it. None: not known.

        What lies beyond the range is never inferred to have it.
        """
        return self.contains(release) or self.has(release)

    def untested(self, release: Release) -> str:
        """Return the sentence for a release that nobody tested, with those beside it, if they have the fault."""
        beside = ""
        if isinstance(release, Version) and self.contains(release):
            before, after = self.beside(release)
            beside = f": {before} and {after}, beside it, have it"
        return table().untested.format(self.package, release, beside)

    def _has_all(self, span: SpecifierSet) -> bool | None:
        ends = {version(each.version.removesuffix(".*")) for each in span}
        if not ends:  # any release
            return None
        judge = self.contains if any(span.filter(self.ever_tested)) else self.has  # then its ends, as single releases
        inside = {*map(judge, span.filter(self.ever_tested | ends))}
        return inside.pop() if len(inside) == 1 else None

    @property
    def conditions(self) -> When:
        """Those of `when`. Empty: it is none of a training."""
        return self.when or {}

    @computed_field  # type: ignore[prop-decorator]
    @functools.cached_property
    def asks(self) -> dict[str, str]:
        """By condition: what is asked of a user who does not say it."""
        return {name: table().questions[name].format(fits) for name, fits in self.conditions.items()} | self.ask

    @property
    def said(self) -> str:
        return f"{self.sentence} {self.found}"

    @property
    def in_releases(self) -> str:
        """The sentence, with the releases of which it is so."""
        return f"{self.sentence.rstrip('.')} ({self.package} {self.releases})"

    @property
    def called(self) -> str:
        """What it is: a limit that the library documents is none of its faults."""
        return self.kind if self.kind == "documented difference" else "fault"

    @property
    def is_not_filed(self) -> bool:
        """Whether no thread is about its cause: `upstream` is the nearest one then."""
        return self.nearest or self.kind == "new finding"

    @property
    def outcome(self) -> str:
        return f"is a {self.called} of {self.package} {self.releases}: {self.sentence.rstrip('.')}"


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid")

    untested: str
    which_release: str
    asked: dict[str, tuple[str, ...]]
    questions: dict[str, str]  # by condition
    values: dict[str, Values]  # by condition: those that a flag or a config can give it
    other_keys: tuple[str, ...]  # of configs, which DeepSpeed, Accelerate and the Trainer do not have
    settings: dict[str, str]  # conditions by the names that `study diff` has for what a config says; the later count
    trainers: tuple[str, ...]  # that force settings
    defaults: dict[str, dict[str, bool]]  # of a trainer
    symptoms: dict[str, str]  # and other words for each
    silent: tuple[str, ...]  # symptoms that begin so make a training wrong without a message
    optimizers: tuple[str, ...]  # a name that contains one is this one
    packages: dict[str, str]  # by the names that lists give them
    families: dict[str, dict[Literal["yes", "no"], tuple[str, ...]]]  # of models, by the question that they answer
    fault: tuple[Fault, ...]

    @model_validator(mode="after")
    def _refuse_wrong_faults(self) -> Self:
        """Raise ValueError for a fault that no command could show, with all that is wrong with it."""
        ids = [fault.id for fault in self.fault]
        for fault in self.fault:
            wrong = [*_wrong_range(fault, self), *_wrong_right_ones(fault, self)]
            wrong += [*_wrong_remedy(fault, self), *_wrong_source(fault)]
            wrong += [*_wrong_conditions(fault, self), *_wrong_questions(fault, self), *_wrong_symptom(fault, self)]
            if ids.count(fault.id) > 1:
                wrong.append("another fault has this id: choose one of its own")
            if wrong:
                raise ValueError(f"fault {fault.id}: {'; '.join(wrong)}")
        return self


def _asked_of(fault: Fault, table: Table) -> tuple[str, ...]:
    return fault.asked or table.asked.get(fault.package, ())


def _wrong_range(fault: Fault, table: Table) -> Iterator[str]:
    """Yield what is wrong with the releases of a fault."""
    asked = _asked_of(fault, table)
    if not asked:
        yield f"no list of releases is kept of {fault.package}: say in `asked` which were looked at"
    else:
        for key in ("since", "until"):
            release = getattr(fault, key)
            if release not in asked:
                tested = ", ".join(asked)
                what = f"`{key}` must be a release that was tested, of {tested} (got {release}): widen no range"
                yield f"{what}, or list in `asked` all releases that you ran or read for this fault"
    if {fault.since, fault.until} <= {*asked} and version(fault.until) < version(fault.since):
        yield f"`until`, the last release that has it, is older than the first, `since`: {fault.until}, {fault.since}"
    if not re.match(rf"{re.escape(fault.since)}( to {re.escape(fault.until)})?(;|$)", fault.releases):
        yield f'`releases` must begin with the range: "{fault.since} to {fault.until}; right in ..."'


RELEASE = re.compile(r"\d+(?:\.\d+)+")


def _wrong_right_ones(fault: Fault, table: Table) -> Iterator[str]:
    """Yield what is wrong with the releases of which `releases` says that they are right."""
    asked = _asked_of(fault, table)
    right = [release for part in re.findall("right in ([^;]+)", fault.releases) for release in RELEASE.findall(part)]
    for release in right:
        if asked and release not in asked:
            yield f"`releases` says right in {release}, which was not tested: name one of {', '.join(asked)}"
        elif fault.contains(version(release)):
            yield f"`releases` says right in {release}, which lies in the range {fault.since} to {fault.until}"


# A release that a remedy tells to take, with the package before it. What stands behind `before` is to leave.
TAKEN = re.compile(
    r"""
    (?<!\bbefore[ ])
    (?: \b(?P<package>[A-Za-z][\w-]*?)(?:[ ]|[=~>]=|-) )?
    (?<![\w.]) (?P<release>\d+(?:\.\d+)+)
    (?P<later>[ ]or[ ](?:later|newer))?
    """,
    re.VERBOSE,
)
# A release behind one of these is of the package that was named last.
BEFORE = ("take", "or", "use", "pin", "to", "install", "with", "release", "version")


def _taken(do: str, own: str, names: dict[str, str]) -> Iterator[re.Match]:
    """Yield where a remedy tells to take a release of the fault's own package. `names` are those of packages."""
    package = own
    for taken in TAKEN.finditer(do):
        name = (taken["package"] or "").lower()
        package = names.get(name, package)
        if package == own and (name in names or name in BEFORE):
            yield taken


def _wrong_remedy(fault: Fault, table: Table) -> Iterator[str]:
    """Yield the releases that a remedy tells to take although they have the fault."""
    for do in (fault.do, *fault.do_with.values()):
        for taken in _taken(do, fault.package, table.packages):
            release, later = version(taken["release"]), taken["later"] or ""
            if fault.contains(release) or (later and release <= version(fault.until)):
                yield f"`do` names {release}{later}, which has the fault: it is in {fault.since} to {fault.until}"


def _wrong_source(fault: Fault) -> Iterator[str]:
    """Yield what is wrong with what a fault rests on."""
    if fault.rests_on == "script" and not fault.script:
        yield "it rests on a script: name one of reproductions/ in `script`"
    if fault.upstream and not re.match(r"https://[\w.-]+/\S", fault.upstream):
        yield f"`upstream` must be an address that begins with https:// (got {fault.upstream!r:.80})"


def _wrong_conditions(fault: Fault, table: Table) -> Iterator[str]:
    """Yield what is wrong with the conditions of a fault: without them no training has it."""
    if fault.when is not None and not (fault.symptom and fault.do):
        yield "a fault with `when` needs `symptom`, what is seen, and `do`, the remedy"
    values = table.values | {"optimizer": [*table.optimizers]}
    for name, wanted in fault.conditions.items():
        if name not in table.questions:
            yield f"no condition is {name!r}: {nearest(name, table.questions)}"
        elif name == "keys":
            yield from wrong_keys(wanted, table.other_keys)
        elif name == "script":
            yield from wrong_script(wanted)
        elif name in table.asked:
            yield from wrong_release(name, wanted)
        elif name in values:
            yield from wrong_condition(name, wanted, values[name])


def _wrong_symptom(fault: Fault, table: Table) -> Iterator[str]:
    """Yield the words of a symptom that no command looks for: it would hide the fault from who has it."""
    known = [*table.symptoms, *MORE_WORDS]
    for part in fault.symptom.split(", ") if fault.symptom else ():
        word, _, factor = part.partition(" ")
        if word not in known:
            yield f"`symptom` cannot be {part!r:.80}: {nearest(word, known)}"
        elif factor and not FACTOR.fullmatch(factor):
            yield f"`symptom` has another factor than `x N`, `/ g` or `x 65,536`: {part!r:.80}"


# What is asked of a user ends with its only question mark, and shows no list and no value of Python.
PLAIN_QUESTION = re.compile(r"(?!.*(?:True|False,))[^?\[\]{}]*\?", re.DOTALL)


def _wrong_questions(fault: Fault, table: Table) -> Iterator[str]:
    """Yield what is wrong with what a user is asked about the conditions of a fault."""
    for name in fault.ask.keys() - fault.conditions.keys():
        yield f"`ask` has {name}, which `when` does not have"
    for name, wanted in fault.conditions.items():
        question = fault.ask.get(name, table.questions.get(name, "?").format(wanted))
        if name == "keys" and name not in fault.ask:
            yield 'its `keys` need a question to the user: ask = { keys = "Is overlap_comm true?" }'
        elif not PLAIN_QUESTION.fullmatch(question):
            yield f"what is asked about {name} must be one plain question, and end with its only `?` (got {question!r})"


@functools.cache
def table() -> Table:
    remedy = "correct that fault: Fault in study/known/faults.py explains each key"
    return load(
        TABLE, Table, what="the table of faults", remedy=remedy, most_bytes=2**20, known=tuple(Fault.model_fields)
    )


def of_package(package: str) -> list[Fault]:
    return [fault for fault in table().fault if fault.package == package]


@functools.cache
def releases_of(package: str) -> list[Version]:
    """Return the releases of a package that were tested, or that a fault names, from the oldest on."""
    releases = {*table().asked.get(package, ())}
    for fault in of_package(package):
        releases |= {*fault.asked, fault.since, fault.until}
    return sorted(map(version, releases))


def named(id: str) -> Fault:
    return {each.id: each for each in table().fault}[id]
