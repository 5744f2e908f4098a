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
    tested = sorted({Version(each) for fault in known for each in fault.asked or table().asked[name]})
    nearest_old, nearest_new = (min(max(each, tested[0]), tested[-1]) for each in (old, new))
    if nearest_old == nearest_new:
        what = f"no test of ours tells {old} and {new} apart: the tested release nearest to both is {nearest_old}"
        raise Stop(what, f"take two of {', '.join(map(str, tested))}")
    notes = [*_inferred(old, nearest_old, tested), *_inferred(new, nearest_new, tested)]
    old, new = nearest_old, nearest_new
    fixed, added = _changed(known, old, new), _changed(known, new, old)
    both = [fault for fault in known if fault.inferred(old) and fault.inferred(new)]
    are_new = number_of(len(added), "are new").replace("1 are", "1 is")
    counts = f"{number_of(len(fixed), 'known faults')} fixed, {are_new}"
    if notes and not (fixed or added):
        counts = "no test of ours tells them apart"
    say_wrapped(f"From {name} {old} to {new}: {counts}.", *notes, "")
    _show_faults(fixed, added)
    if both:
        say_wrapped("", f"Both have: {', '.join(_ids(both))}. `study explain ID` says more.")
    if unknown := sum(None in (fault.inferred(old), fault.inferred(new)) for fault in known):
        others = number_of(unknown, "others")
        say_wrapped("", f"Of {others} nobody tested one of the two: `study stack {package}=={new}` names them.")
    answer = {"fixed": _ids(fixed), "new": _ids(added), "both": _ids(both)}
    if name not in ("accelerate", "deepspeed"):  # of these, kept answers say which configs and defaults changed
        return answer
    from study.conform import releases as kept  # it takes as long as all else here
    from study.conform.command import conform

    adapter = f"{name}-configuration"
    since, until = kept.enclosing(adapter, old, new)
    say("")
    if (since, until) != (str(old), str(new)):
        say_wrapped(f"What changes in configs and defaults is known of {since} and {until}, the nearest that were run.")
    return answer | conform((adapter,), release=f"{since}..{until}")


def _show_faults(fixed: list[Fault], added: list[Fault]) -> None:
    for fault in added:
        say_wrapped(f"New: {with_id(fault.in_releases, fault.id)}", indent="    ")
        say_indented(f"What to do: {fault.do}.")
    for fault in fixed:
        say_wrapped(f"Fixed: {with_id(fault.in_releases, fault.id)}", indent="    ")


def _inferred(release: Version, nearest: Version, tested: list[Version]) -> list[str]:
    """Return a sentence for a release that nobody tested."""
    if release != nearest:
        return [f"Nobody tested {release}: this is of {nearest}, the nearest that was."]
    if release in tested:
        return []
    before = max(each for each in tested if each < release)
    after = min(each for each in tested if each > release)
    return [f"Nobody tested {release}: what it has is inferred by its neighbours {before} and {after}."]


def _ids(faults: list[Fault]) -> list[str]:
    return [fault.id for fault in faults]


def _changed(known: list[Fault], has: Version, has_not: Version) -> list[Fault]:
    return [fault for fault in known if fault.inferred(has) and fault.inferred(has_not) is False]
