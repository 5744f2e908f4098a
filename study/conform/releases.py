"""`study versions` and `study bisect`: properties over releases of a library.

A release is installed beside the environment (an overlay), from the package index, by its exact version, and by its
hash where `hashes.json` has one. Its code is run. Each release and adapter has one file of results: what exists is not
run again.
"""

import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro
from packaging.version import InvalidVersion, Version

from study.conform import changes, output, ranges, trials
from study.conform.properties import Property, read
from study.conform.suite import ADAPTERS, Adapter, Ranks, Result, run
from study.errors import Stop
from study.io.parsing import from_json, from_toml
from study.io.tables import say, show
from study.io.validation import nearest
from study.machine.software import put_programs_on_path

OVERLAYS = Path("runs/overlays")
RESULTS = Path("runs/releases")


@dataclass(frozen=True)
class Release:
    """A release of a package in a folder of its own; or the reason why it is not there."""

    package: str
    version: str
    sha256: str | None = None
    reason: str = ""


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
            archive = json.loads(report.read_text())["install"][0]["download_info"]["archive_info"]
            release = Release(package, version, archive["hashes"]["sha256"])
            hashes.write_text(json.dumps(known | {f"{package}=={version}": release.sha256}, indent=1) + "\n")
    note.write_text(json.dumps(asdict(release), indent=1) + "\n")
    return release


def cell(adapter: Adapter, properties: list[Property], release: Release, overlays: Path, out: Path) -> list[Result]:
    """Return the results of one release: from its file, or run now. A release that cannot be used has its reason."""
    folder = out / f"{release.package}-{release.version}"
    path = folder / f"{adapter.name}.json"
    content = from_json(path.read_bytes()) if path.exists() else {}
    results = output.load(path)[0] if path.exists() else []
    have = {result.property for result in results}
    lacking = [each for each in properties if each.name not in have]
    versions = output.installed() | {release.package: release.version}
    if release.reason:
        output.keep(folder, adapter, results, versions, reason=release.reason)
    reason = release.reason or content.get("reason", "")
    if not lacking or reason:
        return results + _without(reason, adapter, lacking)

    def keep(result: Result) -> None:
        results.append(result)
        output.keep(folder, adapter, results, versions)

    before = _cpu_s()
    try:
        with Ranks(overlays / folder.name, overlays / f"{folder.name}.log") as ranks:
            imported = ranks.imported(adapter)[release.package]
            if imported is None or Version(imported).base_version != release.version:
                raise RuntimeError(f"{release.package} {imported} was imported instead of {release.version}")
            run(adapter, lacking, ranks, keep, shrink=False)
    except Stop as stop:
        output.keep(folder, adapter, results, versions, reason=stop.what)
        return results + _without(stop.what, adapter, lacking[len(results) - len(have) :])
    if not have:  # the time of a whole cell
        output.keep(folder, adapter, results, versions, cpu_s=round(_cpu_s() - before, 1))
    return results


def _cpu_s() -> float:
    """Return the processor time of all processes that this one started and that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _without(reason: str, adapter: Adapter, properties: list[Property]) -> list[Result]:
    return [
        Result(adapter.name, each.name, each.sentence, each.source, "not applicable", reason) for each in properties
    ]


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
        changes.tell(package, since, until, out or changes.COMMITTED)
    elif name == "all":
        _matrix(overlays, out or RESULTS)
    elif name:
        _columns(_adapter(name), in_order(releases), package, only, overlays, out or RESULTS)
    else:
        raise Stop("no adapter is named", "study versions zero2 0.18.1, or study versions --from 0.16.4 --to 0.19.8")


def _columns(adapter: Adapter, releases: list[str], package: str, only: str, overlays: Path, out: Path) -> None:
    properties, columns = [each for each in read() if only in each.name], {}
    for release in releases:
        results = cell(adapter, properties, installed(package, release, overlays), overlays, out)
        columns[release] = {result.property: result.status for result in results}
        say(f"{package} {release}: {output.summary(results)}")
    say("")
    show([{"property": p.name} | {each: column.get(p.name) for each, column in columns.items()} for p in properties])


def _matrix(overlays: Path, out: Path) -> None:
    """Run all parts of the matrix, and write what changes."""
    put_programs_on_path()
    plan = from_toml(Path(__file__).with_name("matrix.toml").read_bytes())
    properties = [each for each in read() if each.name in plan["properties"]]
    for part in plan["part"]:
        for adapter, version in itertools.product(part["adapters"], part["releases"]):
            release = installed(part["package"], version, overlays)
            results = cell(ADAPTERS[adapter], properties, release, overlays, out)
            name = f"{release.package}-{version}"
            if not release.reason:
                trials.tried(release.package, version, overlays / name, out / name)
            say(f"{adapter} with {release.package} {version}: {output.summary(results)}")
    changes.write(out)
    ranges.write(out)


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
    """Find the first release where the answer of a property changes, by halving.

    Args:
        name: The adapter, as in study conform.
        wanted: The property.
        releases: The releases to look among, at least two: the first and the last must answer differently.
        package: The library.
        overlays: The folder for installed releases.
        out: The folder for results, one file for each release and adapter.
    """
    adapter, by_name = _adapter(name), {each.name: each for each in read()}
    if wanted not in by_name:
        raise Stop(f"{wanted!r} is not a property", nearest(wanted, by_name))
    ordered = in_order(releases)

    def status(release: str) -> str:
        (result,) = [
            result
            for result in cell(adapter, [by_name[wanted]], installed(package, release, overlays), overlays, out)
            if result.property == wanted
        ]
        say(f"{package} {release}: {result.status}{': ' + result.words if result.words else ''}")
        return result.status

    low, high = 0, len(ordered) - 1
    first, last = status(ordered[low]), status(ordered[high])
    if first == last:
        raise Stop(f"{wanted} is the same in {ordered[low]} and {ordered[high]}", "name releases that differ")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if status(ordered[middle]) == first else (low, middle)
    say("", f"{wanted} changes in {package} {ordered[high]}: {first} in {ordered[low]}, then {status(ordered[high])}.")


def in_order(releases: tuple[str, ...]) -> list[str]:
    try:
        return sorted(set(releases), key=Version)
    except InvalidVersion as error:
        raise Stop(str(error), "give exact releases, such as 0.18.1") from None


def _adapter(name: str) -> Adapter:
    put_programs_on_path()
    if name not in ADAPTERS:
        raise Stop(f"{name!r} is not an adapter", nearest(name, ADAPTERS))
    return ADAPTERS[name]
