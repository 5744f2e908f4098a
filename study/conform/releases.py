"""`study versions` and `study bisect`: properties and scripts over releases of a library.

A release is installed beside the environment (an overlay), from the package index, by its exact version, and by its
hash where `hashes.json` has one. Its code is run. Each release and adapter has one file of results: what exists is not
run again.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import tyro

from study.conform import changes, output, trials
from study.conform.command import chosen_adapters
from study.conform.suite import ADAPTERS, PROPERTIES, Adapter, Property, Ranks, Result, environment, run, table
from study.core.errors import Stop
from study.core.parsing import from_json
from study.core.tables import say, show
from study.core.validation import nearest

OVERLAYS = Path("runs/overlays")
RESULTS = Path("runs/releases")


@dataclass(frozen=True)
class Release:
    """A release of a package in a folder of its own; or the reason why it is not there."""

    package: str
    version: str
    sha256: str | None = None
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.package}-{self.version}"


def installed(package: str, version: str, overlays: Path) -> Release:
    """Install a release, unless it was tried before."""
    note = overlays / f"{package}-{version}.json"
    if note.exists():
        return Release(**from_json(note.read_bytes()))
    overlays.mkdir(parents=True, exist_ok=True)
    hashes = overlays / "hashes.json"
    known = from_json(hashes.read_bytes()) if hashes.exists() else {}
    sha256 = known.get(f"{package}=={version}")
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = Path(folder, "wanted.txt"), Path(folder, "report.json")
        wanted.write_text(f"{package}=={version}" + (f" --hash=sha256:{sha256}\n" if sha256 else "\n"))
        target = ["--target", str(overlays / f"{package}-{version}"), "--report", str(report)]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
        env = os.environ | {"DS_BUILD_OPS": "0"}
        done = subprocess.run([*pip, *target, "-r", str(wanted)], env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = next((line for line in done.stderr.splitlines() if "ERROR" in line), "pip failed")
            release = Release(package, version, sha256, f"cannot be installed: {reason}"[:300])
        else:
            archive = from_json(report.read_bytes())["install"][0]["download_info"]["archive_info"]
            release = Release(package, version, archive["hashes"]["sha256"])
            hashes.write_text(json.dumps(known | {f"{package}=={version}": release.sha256}, indent=1) + "\n")
    note.write_text(json.dumps(asdict(release), indent=1) + "\n")
    return release


def cell(adapter: Adapter, properties: list[Property], release: Release, overlays: Path, out: Path) -> list[Result]:
    """Return the results of one release: from its file, or run now. A release that cannot be used has its reason."""
    path = out / str(release) / f"{adapter.name}.json"
    content = from_json(path.read_bytes()) if path.exists() else {}
    results = output.load(path)[0] if content else []
    reason = release.reason or content.get("reason", "")
    versions = output.installed() | {release.package: release.version}
    have = {result.property for result in results}
    lacking = [each for each in properties if each.name not in have]

    def keep(*new: Result) -> None:
        results.extend(new)
        output.keep(path.parent, adapter, results, versions, reason=reason)

    if lacking and not reason:
        try:
            _hold(adapter, lacking, release, overlays / str(release), keep)
        except Stop as stop:
            reason = stop.what
    if lacking:
        keep()
    have = {result.property for result in results}
    without = [each.name for each in lacking if each.name not in have]
    results += [Result(adapter.name, name, "not applicable", reason) for name in without]
    say(f"{adapter.name} with {release.package} {release.version}: {output.summary(results)}")
    return results


def _hold(adapter: Adapter, properties: list[Property], release: Release, overlay: Path, keep: Callable) -> None:
    """Hold an adapter to properties, with a release in the place of what is installed."""
    with Ranks(overlay, overlay.with_name(f"{release}.log")) as ranks:
        trials.require(release.package, release.version, ranks.answer(adapter, {})[release.package])
        run(adapter, properties, ranks, keep, shrink=False)


def versions(
    name: tyro.conf.Positional[str] = "",
    releases: tyro.conf.Positional[tuple[str, ...]] = (),
    /,
    *,
    since: Annotated[str, tyro.conf.arg(name="from")] = "",
    until: Annotated[str, tyro.conf.arg(name="to")] = "",
    package: str = "deepspeed",
    only: str = "",
    overlays: Path = OVERLAYS,
    out: Path | None = None,
) -> None:
    """Hold releases of a library to the properties, or say what changes from one release to another.

    With --from and --to nothing is run: the results of this study are read. Otherwise each release is installed from
    the package index, and its code is run. That takes a minute or two for the first time. Run it again to continue.

    Args:
        name: The adapter, as in study conform; or all, for every release and adapter of study/conform/matrix.toml.
        releases: The releases, such as 0.18.1.
        since: Say what changes from this release on.
        until: Say what changes up to this release.
        package: The library.
        only: Run only properties whose name contains this text.
        overlays: The folder for installed releases.
        out: The folder for results, one file for each release and adapter. The default is runs/releases, and with
            --from the results of this study.
    """
    if since or until:
        if only:
            raise Stop("--only is for releases that are run", "leave it out with --from and --to")
        changes.tell(package, since, until, out or changes.RELEASES)
    elif name == "all":
        _matrix(overlays, out or RESULTS)
    elif name:
        (adapter,) = chosen_adapters((name,))
        properties = [each for each in PROPERTIES.values() if only in each.name]
        if not releases:
            raise Stop("no release is named", "name some, such as 0.18.1")
        if not properties:
            raise Stop(f"no property has {only!r} in its name", "see study conform for their names")
        statuses: dict[str, dict] = {each.name: {"property": each.name} for each in properties}
        for version in changes.in_order(releases):
            for result in cell(adapter, properties, installed(package, version, overlays), overlays, out or RESULTS):
                statuses.get(result.property, {})[version] = result.status
        show(list(statuses.values()))
    else:
        raise Stop("no adapter is named", "study versions zero2 0.18.1, or study versions --from 0.16.4 --to 0.19.8")


def _matrix(overlays: Path, out: Path) -> None:
    """Run every part of matrix.toml, and what releases answer to the trials."""
    plan = table("matrix")
    properties = [PROPERTIES[each] for each in plan["properties"]]
    for part in plan["part"]:
        for adapter, version in product(chosen_adapters(tuple(part["adapters"])), part["releases"]):
            release = installed(part["package"], version, overlays)
            cell(adapter, properties, release, overlays, out)
            if not release.reason:
                trials.tried(release.package, version, overlays / str(release), out / str(release))
    changes.write(out)


def bisect(
    name: tyro.conf.Positional[str],
    wanted: tyro.conf.Positional[str],
    releases: tyro.conf.Positional[tuple[str, ...]],
    /,
    *,
    package: str = "deepspeed",
    overlays: Path = OVERLAYS,
    out: Path = RESULTS,
) -> None:
    """Find the first release where an answer changes, by halving: of a property, or a script of yours.

    Args:
        name: The adapter, as in study conform; or the word script.
        wanted: The property; or the path of a script that exits with 0 or with something else. A script is run with
            each release that is tried.
        releases: The releases to look among, at least two: the first and the last must answer differently.
        package: The library.
        overlays: The folder for installed releases.
        out: The folder for results, one file for each release and adapter.
    """
    _require(name, wanted)
    ask = _of_script if name == "script" else _of_property
    ordered = changes.in_order(releases)

    @functools.cache
    def answer(version: str) -> str:
        words = ask(name, wanted, installed(package, version, overlays), overlays, out)
        say(f"{package} {version}: {words}")
        return words

    if len(ordered) < 2:
        raise Stop(f"two releases are needed (got {len(ordered)})", "name the first and the last to look among")
    low, high = 0, len(ordered) - 1
    if answer(ordered[low]) == answer(ordered[high]):
        raise Stop(f"{wanted} is the same in {ordered[0]} and {ordered[-1]}", "name releases that differ")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if answer(ordered[middle]) == answer(ordered[low]) else (low, middle)
    first, last = ordered[low], ordered[high]
    say("", f"{wanted} changes in {package} {last}: {answer(first)} in {first}, then {answer(last)}.")


def _require(name: str, wanted: str) -> None:
    """Raise Stop unless releases can be asked about this."""
    if name == "script":
        if not Path(wanted).is_file():
            raise Stop(f"there is no file {wanted}", "name a Python script")
    elif chosen_adapters((name,)) and wanted not in PROPERTIES:
        raise Stop(f"{wanted!r} is not a property", nearest(wanted, PROPERTIES))


def _of_script(name: str, wanted: str, release: Release, overlays: Path, out: Path) -> str:
    environ = environment(overlays / str(release))
    code = subprocess.run([sys.executable, wanted], env=environ, check=False).returncode
    return f"exit code {min(abs(code), 1)}"


def _of_property(name: str, wanted: str, release: Release, overlays: Path, out: Path) -> str:
    results = cell(ADAPTERS[name], [PROPERTIES[wanted]], release, overlays, out)
    return next(each.status for each in results if each.property == wanted)
