"""`study conform`: hold ways of sharding to one process, on the same weights and data, with the same arithmetic."""

import sys
import tempfile
from collections import Counter
from pathlib import Path

import pandas as pd
import tyro

from study.conform import releases
from study.conform.suite import ADAPTERS, PROPERTIES, Adapter, Answer, Property, Ranks, explanation, libraries
from study.core.errors import Stop, nearest
from study.core.text import during, say, say_wrapped, show


def conform(
    names: tyro.conf.Positional[tuple[str, ...]] = (),
    /,
    *,
    only: str = "",
    release: str = "",
    out: Path | None = None,
) -> None:
    """Is a sharded training equal to one process? Each property is tried on two gloo ranks, some on one or four.

    Without names, the adapters of this study are listed, and the properties with where they come from. A property
    holds, fails, is refused by the library in its words, or is not applicable. The exit code is 1 if one fails.

    Args:
        names: The adapters of this study to run, or all; or a file with an adapter of yours. It is Python code, and
            runs with your rights: run only code that you trust. It defines build, forward_backward, step,
            whole_weights, and if it can gradient_norm, save and load. examples/toy_adapter.py is one.
        only: Run only properties whose name contains this text.
        release: A release of the adapter's library, such as 0.18.1: it is installed from the package index into
            runs/overlays, and its code is run. Two releases, such as 0.16.4..0.19.8: nothing is run, and the kept
            answers say what changes between them.
        out: Add the answers to answers.csv in this folder, and write each failure as a script that runs alone.
    """
    properties = [each for name, each in PROPERTIES.items() if only in name]
    if not properties:
        raise Stop(f"no property has {only!r} in its name", "study conform lists them")
    if not names:
        show([{"adapter": each.name, "what": each.about} for each in ADAPTERS.values()])
        show([{"property": each.name, "says": each.sentence, "from": each.source} for each in properties])
        return
    if ".." in release:
        for name in names:
            _tell_changes(name, only, *release.split("..", 1))
        return
    found = [_hold(each, properties, release, out) for each in _chosen(names)]
    sys.exit(int(any(answer.answer == "fails" for answers in found for answer in answers)))


def _chosen(names: tuple[str, ...]) -> list[Adapter]:
    """Return the adapters of these names, or in these files."""
    if names == ("all",):
        return list(ADAPTERS.values())
    chosen = []
    for name in names:
        if Path(name).is_file():
            chosen.append(Adapter(Path(name).stem, str(Path(name).resolve()), name))
        elif name in ADAPTERS:
            chosen.append(ADAPTERS[name])
        else:
            raise Stop(f"{name!r} is neither an adapter nor a file", nearest(name, ADAPTERS))
    return chosen


def _hold(adapter: Adapter, properties: list[Property], release: str, out: Path | None) -> list[Answer]:
    """Hold an adapter to properties, and say what came of it."""
    package, _, version = release.rpartition("==")
    package = package or adapter.package
    if release and not package:
        raise Stop("releases of which library are meant?", "name it, as in --release mylib==1.2")
    overlay = releases.installed(package, version) if release else None
    found = []
    with tempfile.TemporaryDirectory() as logs, Ranks(Path(logs, "log.txt"), overlay) as ranks:
        for each in properties:
            with during(f"{adapter.name}: {each.name}"):
                found.append(ranks.ask(adapter, each.name, out and out.resolve() / "scripts"))
    imported = getattr(found[0], package, version)
    if release and imported != version:
        raise Stop(f"{package} {imported} was imported instead of {version}", "remove its folder in runs/overlays")
    if out:
        releases.keep(out / "answers.csv", found)
    _tell(adapter, found)
    return found


def _tell(adapter: Adapter, found: list[Answer]) -> None:
    counted = Counter(each.answer for each in found)
    asked = len(found) - counted["not applicable"]
    say(f"{adapter.name}: {counted['holds']} of {asked} properties hold with {libraries(found[0])}.", "")
    axes = pd.crosstab([PROPERTIES[each.property].axis for each in found], [each.answer for each in found])
    show(axes.rename_axis("axis").reset_index().to_dict("records"))
    for each in found:
        if each.answer != "holds":
            say_wrapped(f"{each.answer}: {each.property}: {each.words}", indent="  ")
            say_wrapped(*filter(None, [explanation(each)]), indent="    ", first="    ")


def _tell_changes(name: str, only: str, since: str, until: str) -> None:
    """Say which kept answers change from one release to another, and why."""
    changed, wrong = releases.changes(name, since, until, only)
    say(f"{name}: {sum(map(len, changed.values()))} answers change from {since} to {until}.", "")
    show([{"answers": history, "of": ", ".join(questions)} for history, questions in changed.items()])
    for why in dict.fromkeys(filter(None, map(explanation, wrong))):
        say_wrapped(why, indent="  ", first="- ")
