"""What changes between two releases of a library: known faults, and what kept answers say of configs and defaults."""

from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

from study.cli.findings import say_indented
from study.configs.sources import OTHER, read
from study.core.arms import IS_CHECKOUT
from study.core.errors import Stop, nearest
from study.core.text import number_of, say, say_wrapped
from study.known import lists
from study.known.between import Between, between, two_lists
from study.known.faults import ANY, Fault, Release, table
from study.known.findings import with_id

KEPT = ("accelerate", "deepspeed")  # of which kept answers say what changed in configs and defaults


def apart(package: str, releases: list[str]) -> dict:
    """Show what changes from the older to the newer of two releases, of faults as far as they are known."""
    name = table().packages.get(package.lower())
    if name is None:
        raise Stop(f"of {package!r:.80} nothing is known", nearest(package, table().packages))
    if not all(isinstance(lists.release_of(release), Version) for release in releases):
        raise Stop(f"{' or '.join(releases):.80} is no release", f"write two, such as {package}==0.19.8")
    changes = between(name, *sorted(map(Version, releases)))
    answer = show_faults(changes)
    return answer | show_configs(changes) if name in KEPT else answer


def listed(path: Path) -> dict[str, Release]:
    """Return the releases that a list names; empty if the file is a config, or names none."""
    if not path.is_file() or path.suffix == ".json":
        return {}
    if path.suffix in (".yaml", ".yml") and read(path).kind != OTHER:
        return {}
    releases = lists.listed(lists.content(str(path)))
    return releases if {*releases.values()} - {ANY} else {}


def lists_apart(first: Path, second: Path) -> dict:
    """Show what changes between the releases of two lists, one package after the other."""
    two = two_lists(listed(first), listed(second))
    differ = ", ".join(f"{name} ({a} and {b})" for name, (a, b) in two.pinned.items())
    nothing = "none of those of which faults are known"
    say_wrapped(f"Packages whose release differs between A, {first}, and B, {second}: {differ or nothing}.", *two.notes)
    answer = {}
    for package, (a, b) in two.pinned.items():
        say("")
        try:
            answer[package] = apart(package, [str(a), str(b)])
        except Stop as stop:  # of the other packages more may be known
            say_wrapped(f"{package}: {stop.what}.")
            answer[package] = {"not_known": stop.what}
    return {"packages": answer, "notes": two.notes}


def show_faults(changes: Between) -> dict[str, list[str]]:
    """Show which faults are new, fixed or in both releases. Return their ids."""
    say_wrapped(f"From {changes.package} {changes.old} to {changes.new}: {counted(changes)}.", *changes.notes, "")
    for fault in changes.added:
        say_wrapped(f"New: {with_id(fault.in_releases, fault.id)}", indent="    ")
        say_indented(f"What to do: {fault.do}.")
    for fault in changes.fixed:
        say_wrapped(f"Fixed: {with_id(fault.in_releases, fault.id)}", indent="    ")
    if changes.both:
        say_wrapped("", f"Both have: {', '.join(ids_of(changes.both))}. `study explain ID` says more.")
    if changes.unknown:
        others = number_of(changes.unknown, "others")
        names_them = f"`study stack {changes.package.lower()}=={changes.new}` names them"
        say_wrapped("", f"Of {others} nobody tested one of the two: {names_them}.")
    return {"fixed": ids_of(changes.fixed), "new": ids_of(changes.added), "both": ids_of(changes.both)}


def counted(changes: Between) -> str:
    """Return how many faults were fixed and are new."""
    if changes.notes and not changes.fixed and not changes.added:
        return "no test of ours tells them apart"
    are_new = number_of(len(changes.added), "are new").replace("1 are", "1 is")
    return f"{number_of(len(changes.fixed), 'known faults')} fixed, {are_new}"


def ids_of(faults: list[Fault]) -> list[str]:
    return [fault.id for fault in faults]


def show_configs(changes: Between) -> dict:
    """Show which configs are accepted otherwise, and which defaults changed. A wheel has no kept answers."""
    if not (IS_CHECKOUT and find_spec("pandas")):
        say_wrapped("", "A checkout with `make setup` says what changes in configs and defaults.")
        return {}
    from study.conform import releases as kept  # it takes as long as all else here
    from study.conform.command import conform

    adapter = f"{changes.package}-configuration"
    since, until = kept.enclosing(adapter, changes.old, changes.new)
    say("")
    if (since, until) != (str(changes.old), str(changes.new)):
        say_wrapped(f"What changes in configs and defaults is known of {since} and {until}, the nearest that were run.")
    return conform((adapter,), release=f"{since}..{until}")
