"""What changes from one release of a library to another, of known faults."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from packaging.version import Version

from study.core.errors import Stop
from study.known.faults import Fault, Release, of_package


@dataclass(frozen=True)
class Between:
    """Two tested releases, the nearest to those that were asked, and what changes from the older to the newer."""

    package: str
    old: Version
    new: Version
    notes: list[str]  # on releases that nobody tested
    fixed: list[Fault]
    added: list[Fault]
    both: list[Fault]
    unknown: int  # faults of which nobody tested one of the two


def between(package: str, asked_old: Version, asked_new: Version) -> Between:
    """Compare two releases. Raise Stop where no test tells them apart."""
    faults = [fault for fault in of_package(package) if fault.when]
    tested = sorted({release for fault in faults for release in fault.tested})
    old, new = nearest_tested(asked_old, tested), nearest_tested(asked_new, tested)
    if old == new:
        what = f"no test of ours tells {asked_old} and {asked_new} apart: the tested release nearest to both is {old}"
        raise Stop(what, f"take two of {', '.join(map(str, tested))}")
    return Between(
        package,
        old,
        new,
        notes=[*untested(asked_old, tested), *untested(asked_new, tested)],
        fixed=[fault for fault in faults if fault.inferred(old) and fault.inferred(new) is False],
        added=[fault for fault in faults if fault.inferred(new) and fault.inferred(old) is False],
        both=[fault for fault in faults if fault.inferred(old) and fault.inferred(new)],
        unknown=sum(None in (fault.inferred(old), fault.inferred(new)) for fault in faults),
    )


def nearest_tested(release: Version, tested: list[Version]) -> Version:
    """Return a release that lies in what was tested, and else the end of it that is nearest."""
    return min(max(release, tested[0]), tested[-1])


def untested(release: Version, tested: list[Version]) -> Iterator[str]:
    """Yield a sentence for a release that nobody tested."""
    nearest = nearest_tested(release, tested)
    if release != nearest:
        yield f"Nobody tested {release}: this is of {nearest}, the nearest that was."
    elif release not in tested:
        before = max(each for each in tested if each < release)
        after = min(each for each in tested if each > release)
        yield f"Nobody tested {release}: what it has is inferred by its neighbours {before} and {after}."


@dataclass(frozen=True)
class TwoLists:
    """What two lists say of the packages that the table has."""

    pinned: dict[str, tuple[Version, Version]]  # other releases in the second
    notes: list[str]  # on packages of which one list says no release


def two_lists(a: Mapping[str, Release], b: Mapping[str, Release]) -> TwoLists:
    """Compare two lists of releases, by package."""
    pinned, notes = {}, []
    for package in sorted({*a, *b}):
        first, second = a.get(package), b.get(package)
        if first == second:
            continue
        if isinstance(first, Version) and isinstance(second, Version):
            pinned[package] = (first, second)
        else:
            notes.append(f"{package}: A has {said_of(first)}, B {said_of(second)}.")
    return TwoLists(pinned, notes)


def said_of(release: Release | None) -> str:
    return "none" if release is None else str(release) or "no release"
