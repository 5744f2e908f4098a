"""Which known faults apply to these releases, in this training? Needs no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from study.core.settings import flag
from study.core.text import comparable, is_number
from study.known import lists
from study.known.faults import Fault, Release, of_package, table
from study.known.findings import with_id
from study.known.stacks import Flags, Stack, is_in

# Who surely has this one has one micro-batch in an update, and so none of the faults of several.
ONE_MICRO_BATCH = "each-micro-batch-updates"
USUAL = {"passes"}  # what most trainings with several GPUs have
# What a user can give to answer a question about a condition.
GIVEN_AS = {each.name: flag(each.name) for each in fields(Flags)} | {"stage": "--stage, --fsdp2, --fsdp1, --ddp"}

# Applies: nothing is open, and the release was tested. Likely: nothing is open, and the tested releases before and
# after this one have it, or a file's name alone says a condition; or its symptom was seen, and an upgrade brought it,
# or only a usual condition is open.
Answer = Literal["applies", "likely", "applies if"]
ANSWERS: dict[Answer, str] = {"applies": "Applies here", "likely": "Likely", "applies if": "May apply"}  # as it is told


class OpenQuestion(NamedTuple):  # an answer makes thousands
    """What has to be so for a fault to apply, and nobody has said."""

    condition: str
    flag: str  # that answers it; empty: only somebody who looks at the script or the config can
    text: str


@dataclass(frozen=True)
class Applies:
    """A fault that applies to a stack, likely does, or does if all questions are answered with yes."""

    fault: Fault
    answer: Answer
    why: tuple[OpenQuestion, ...]
    release: Release
    is_tested: bool  # not: it lies between releases that were, or beyond them
    do: str  # the remedy, in the trainer that is used
    is_seen: bool  # its symptom

    @property
    def unknown(self) -> set[str]:
        """The conditions of which nobody says anything."""
        return {question.condition for question in self.why}

    @property
    def asks(self) -> str:
        """What would decide whether it applies; empty: nothing is open."""
        untested = [] if self.is_tested else [self.fault.untested(self.release)]
        return " ".join([*untested, *(question.text for question in self.why)])

    @property
    def in_one_line(self) -> str:
        """How sure it is that the fault applies, its sentence, and what would decide more."""
        return f"{ANSWERS[self.answer]}: {with_id(self.fault.in_releases, self.fault.id)} {self.asks}".rstrip()

    @property
    def may_be_inside(self) -> bool:
        """Whether the release is in the fault's range, or may be."""
        return isinstance(self.release, SpecifierSet) or self.fault.contains(self.release)

    @property
    def order(self) -> tuple:
        """What applies comes first, then wrong trainings of which at least half is said, then what is least open.

        A release between two that have a fault most likely has it: that it was not asked leaves nothing open.
        """
        is_open = len(self.why)
        is_said = len(self.fault.conditions) - is_open
        is_silent = self.fault.symptom.startswith(table().silent)
        return (
            [*ANSWERS].index(self.answer),
            not self.may_be_inside,
            not (is_silent and is_said >= is_open),
            -is_said,
            is_open,
        )


def which_apply(stack: Stack) -> list[Applies]:
    """Return the faults that apply to a stack, or may, in the order in which people want to read them."""
    found = [each for fault in table().fault if (each := applies(fault, stack))]
    if any(each.fault.id == ONE_MICRO_BATCH and each.answer == "applies" for each in found):
        found = [each for each in found if each.fault.id == ONE_MICRO_BATCH or "passes" not in each.fault.conditions]
    return sorted(found, key=lambda each: each.order)


def stack(*releases: str, flags: Flags = Flags()) -> list[Applies]:
    """Return the known faults that apply to some releases, or may, in the order in which people want to read them.

    `releases` are words such as deepspeed==0.19.8, or files that list them. Without any: those of this environment.
    """
    return which_apply(Stack.of(lists.releases(releases), flags))


def applies(fault: Fault, stack: Stack) -> Applies | None:
    """Return how a fault applies to a stack, or may. None: it does not."""
    questions = _questions(fault, stack)
    if questions is None:
        return None
    release = stack.releases[fault.package]
    has = fault.has(release)
    if has is False:
        return None
    is_tested = True
    if has is None and isinstance(release, Version):
        is_tested = False
    elif has is None:
        text = table().which_release.format(fault.package)
        questions = [OpenQuestion(fault.package, f"the release of {fault.package}", text), *questions]
    do = fault.do_with.get(stack.said["trainer"], fault.do)
    is_seen = fault.symptom in stack.seen
    if is_seen and fault.symptom == "slow":  # its script is asked whether time matters: who writes of it has answered
        questions = [each for each in questions if each.condition != "script"]
    answer = _how_sure(fault, {each.condition for each in questions}, is_seen, stack)
    return Applies(fault, answer, tuple(questions), release, is_tested, do, is_seen)


def is_ruled_out(fault: Fault, stack: Stack) -> bool:
    """Whether a fault does not apply to a stack: what `applies` answers with None, without the rest of its answer."""
    return _questions(fault, stack) is None or fault.has(stack.releases[fault.package]) is False


def _how_sure(fault: Fault, unknown: set[str], is_seen: bool, stack: Stack) -> Answer:
    """Return how sure it is that a fault applies where these conditions are open, for all commands."""
    release = stack.releases[fault.package]
    if not unknown and fault.has(release):
        return "likely" if stack.guessed & fault.conditions.keys() else "applies"
    if not isinstance(release, Version) or not fault.contains(release):
        return "applies if"
    worked = stack.worked.get(fault.package)
    is_new = worked is not None and not fault.contains(worked) and "script" not in unknown
    is_explained = is_seen and (is_new or unknown == USUAL)
    return "likely" if not unknown or is_explained else "applies if"


def free(stack: Stack, package: str) -> list[str]:
    """Return the tested releases of a package without any fault of which all else is so, the newest first.

    A remedy of one fault may have another.
    """
    met = [fault for fault in of_package(package) if _questions(fault, stack) == []]
    tested = reversed(table().asked[package])
    return [release for release in tested if all(fault.has(Version(release)) is False for fault in met)]


def untested(stack: Stack) -> list[str]:
    """Return the packages whose release is in no test of ours. Of trainers none was run."""
    packages = []
    for package, release in stack.releases.items():
        tested = [Version(each) for each in table().asked.get(package, ())]
        if release not in tested:
            packages.append(package)
    return packages


def _questions(fault: Fault, stack: Stack) -> list[OpenQuestion] | None:
    """Return what has to be known for a fault to apply, besides the release. None: it does not apply."""
    if not fault.when or fault.package not in stack.releases:
        return None
    known = _known(fault, stack)
    questions = []
    for condition, wanted in fault.when.items():
        is_so = _is_so(condition, wanted, known, stack.key)
        if is_so is None:
            is_so = _is_shown(condition, wanted, stack.shown)
        if is_so is None:
            questions.append(OpenQuestion(condition, _given_as(condition, wanted), fault.asks[condition]))
        elif not is_so:
            return None
    return questions


def _known(fault: Fault, stack: Stack) -> dict[str, Any]:
    """Return what is said by conditions, with what a trainer forces."""
    known = {**stack.said, **stack.releases}
    trainer = stack.said["trainer"]
    if trainer in fault.forced:
        used = stack.releases.get(trainer)
        is_forced = isinstance(used, Version) and used in SpecifierSet(fault.forced[trainer])
        # Other releases may overrule a user's False in some classes, or were not read.
        known["reentrant"] = is_forced or stack.said.get("reentrant") or None
    return known


def _given_as(condition: str, wanted: Any) -> str:
    """Return what a user gives to answer a question. Empty: only somebody who looks can."""
    if condition in table().asked:
        return f"the release of {condition}"
    if condition == "stage" and wanted == ["ddp"]:
        return "--ddp"
    return GIVEN_AS.get(condition, "")


def _is_so(condition: str, wanted: Any, known: dict[str, Any], key: Callable[[str], Any] | None) -> bool | None:
    """Whether a condition is what a fault wants. None: nobody says it."""
    if condition == "keys":
        if key is None:
            return None
        return any(all(_fits(key(path), each) for path, each in group.items()) for group in wanted)
    seen = known.get(condition)
    if seen is None or isinstance(seen, SpecifierSet):
        return None
    if isinstance(seen, Version):
        return is_in(seen, SpecifierSet(wanted, prereleases=True))
    if seen == "FSDP":  # which of the two is open
        of_fsdp = {"fsdp1", "fsdp2"} & {*map(str, wanted)}
        return None if len(of_fsdp) == 1 else bool(of_fsdp)
    return _fits(seen, wanted)


def _is_shown(condition: str, wanted: Any, shown: Mapping[str, Any]) -> bool | None:
    """Whether a script shows that a condition of a fault is met. None: it is open."""
    if condition == "script":
        return shown.get(wanted)
    return _fits(shown[condition], wanted) if condition in shown else None


def _fits(seen: Any, wanted: Any) -> bool:
    """Whether a value is what a fault wants, as the head of faults.toml explains it."""
    if wanted == "absent":
        return seen is None
    if isinstance(wanted, list):
        return str(seen).lower() in map(str, wanted)  # a config may have AdamW, or "3"; none: it has no such key
    if wanted is True:
        return seen not in (None, False)  # whatever switches it on, if with an empty section
    if type(wanted) is int:  # the least; a config may have no number there
        number = comparable(seen)
        return is_number(number) and number >= wanted
    return seen == wanted
