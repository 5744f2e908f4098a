"""What changes between two releases of a library: known faults, and what kept answers say of configs and defaults."""

from packaging.version import Version

from study.cli.findings import say_indented
from study.core.errors import Stop, nearest
from study.core.text import number_of, say, say_wrapped
from study.known import lists
from study.known.faults import Fault, table
from study.known.findings import with_id


def apart(package: str, releases: list[str]) -> dict:
    """Show what changes from the older to the newer of two releases, of faults as far as they are known."""
    name = table().packages.get(package.lower())
    if name is None:
        raise Stop(f"of {package!r:.80} nothing is known", nearest(package, table().packages))
    if not all(isinstance(lists.release_of(release), Version) for release in releases):
        raise Stop(f"{' or '.join(releases):.80} is no release", f"write two, such as {package}==0.19.8")
    old, new = sorted(map(Version, releases))
    known = [fault for fault in table().fault if fault.package == name and fault.when]
    fixed, added = _changed(known, old, new), _changed(known, new, old)
    both = [fault for fault in known if fault.has(old) and fault.has(new)]
    are_new = number_of(len(added), "are new").replace("1 are", "1 is")
    say_wrapped(f"From {name} {old} to {new}: {number_of(len(fixed), 'known faults')} fixed, {are_new}.", "")
    for fault in added:
        say_wrapped(f"New: {with_id(fault.in_releases, fault.id)}", indent="    ")
        say_indented(f"What to do: {fault.do}.")
    for fault in fixed:
        say_wrapped(f"Fixed: {with_id(fault.in_releases, fault.id)}", indent="    ")
    if both:
        say_wrapped("", f"Both have: {', '.join(_ids(both))}. `study explain ID` says more.")
    if untested := sum(None in (fault.has(old), fault.has(new)) for fault in known):
        others = number_of(untested, "others")
        say_wrapped("", f"Of {others} nobody tested one of the two: `study stack {package}=={new}` names them.")
    answer = {"fixed": _ids(fixed), "new": _ids(added), "both": _ids(both)}
    if name not in ("accelerate", "deepspeed"):  # of these, kept answers say which configs and defaults changed
        return answer
    from study.conform.command import conform  # it takes as long as all else here

    say("")
    return answer | conform((f"{name}-configuration",), release=f"{old}..{new}")


def _ids(faults: list[Fault]) -> list[str]:
    return [fault.id for fault in faults]


def _changed(known: list[Fault], has: Version, has_not: Version) -> list[Fault]:
    return [fault for fault in known if fault.has(has) and fault.has(has_not) is False]
