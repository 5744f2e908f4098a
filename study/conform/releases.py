"""`study versions` and `study bisect`: properties, claims and scripts over releases of a library.

A release is installed beside the environment (an overlay), from the package index, by its exact version, and by its
hash where `hashes.json` has one. Its code is run. Each release and adapter has one file of results: what exists is not
run again.
"""

import functools
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import tyro
from packaging.version import InvalidVersion, Version

from study.conform import changes, output, trials
from study.conform.command import chosen_adapters
from study.conform.suite import PROPERTIES, Adapter, Property, Ranks, Result, environment, run, table
from study.errors import Stop
from study.io.parsing import from_json
from study.io.tables import say, show
from study.io.validation import nearest

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


Question = Callable[[Release], str]


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
    folder, overlay = out / str(release), overlays / str(release)
    path = folder / f"{adapter.name}.json"
    content = from_json(path.read_bytes()) if path.exists() else {}
    results = output.load(path)[0] if path.exists() else []
    about = {"reason": release.reason or content.get("reason", "")}
    versions = output.installed() | {release.package: release.version}
    lacking = [each for each in properties if each.name not in {result.property for result in results}]
    before = 0.0 if results else _cpu_s()

    def keep(*new: Result) -> None:
        results.extend(new)
        output.keep(folder, adapter, results, versions, **about)

    if lacking and not about["reason"]:
        try:
            with Ranks(overlay, overlay.with_name(f"{release}.log")) as ranks:
                imported = ranks.answer(adapter, {})[release.package]
                if imported is None or Version(imported).base_version != release.version:
                    raise RuntimeError(f"{release.package} {imported} was imported instead of {release.version}")
                run(adapter, lacking, ranks, keep, shrink=False)
            about |= {"cpu_s": round(_cpu_s() - before, 1)} if before else {}  # the time of a whole cell
        except Stop as stop:
            about["reason"] = stop.what
    if lacking:
        keep()
    have = {result.property for result in results}
    without = [each.name for each in properties if each.name not in have]
    return results + [Result(adapter.name, name, "not applicable", about["reason"]) for name in without]


def _cpu_s() -> float:
    """Return the processor time of all processes that this one started and that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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
        changes.tell(package, since, until, out or changes.RELEASES)
        return
    if not name:
        raise Stop("no adapter is named", "study versions zero2 0.18.1, or study versions --from 0.16.4 --to 0.19.8")
    if name == "all":
        plan = table("matrix")
        _cells(
            plan["part"], [PROPERTIES[each] for each in plan["properties"]], overlays, out or RESULTS, with_trials=True
        )
        changes.write(out or RESULTS)
        return
    properties = [each for each in PROPERTIES.values() if only in each.name]
    part = {"package": package, "adapters": [name], "releases": in_order(releases)}
    columns = _cells([part], properties, overlays, out or RESULTS)
    show([{"property": p.name} | {each: column.get(p.name) for each, column in columns.items()} for p in properties])


def _cells(
    parts: list[dict], properties: list[Property], overlays: Path, out: Path, with_trials: bool = False
) -> dict[str, dict[str, str]]:
    """Run parts of the matrix. Return the statuses of all properties by release, of the last adapter."""
    columns = {}
    for part in parts:
        for adapter, version in product(chosen_adapters(tuple(part["adapters"])), part["releases"]):
            release = installed(part["package"], version, overlays)
            results = cell(adapter, properties, release, overlays, out)
            columns[version] = {result.property: result.status for result in results}
            say(f"{adapter.name} with {release.package} {version}: {output.summary(results)}")
            if with_trials and not release.reason:
                trials.tried(release.package, version, overlays / str(release), out / str(release))
    return columns


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
    """Find the first release where an answer changes, by halving: of a property, a claim, or a script of yours.

    Args:
        name: The adapter, as in study conform; or the word claim, or the word script.
        wanted: The property; the claim, such as L-15; or the path of a script that exits with 0 or with something
            else. A script is run with each release that is tried.
        releases: The releases to look among, at least two: the first and the last must answer differently.
        package: The library.
        overlays: The folder for installed releases.
        out: The folder for results, one file for each release and adapter.
    """
    question = {"script": _script, "claim": _claim}.get(name) or _property(name)
    ordered, ask = in_order(releases), question(wanted, package, overlays, out)

    @functools.cache
    def answer(version: str) -> str:
        words = ask(installed(package, version, overlays))
        say(f"{package} {version}: {words}")
        return words

    low, high = 0, len(ordered) - 1
    if len(ordered) < 2 or answer(ordered[low]) == answer(ordered[high]):
        raise Stop(f"{wanted} is the same in {ordered[0]} and {ordered[-1]}", "name releases that differ")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if answer(ordered[middle]) == answer(ordered[low]) else (low, middle)
    first, last = ordered[low], ordered[high]
    say("", f"{wanted} changes in {package} {last}: {answer(first)} in {first}, then {answer(last)}.")


def _script(wanted: str, package: str, overlays: Path, out: Path) -> Question:
    """Return a question that a script of the user answers by its exit code."""
    if not Path(wanted).is_file():
        raise Stop(f"there is no file {wanted}", "name a Python script")

    def ask(release: Release) -> str:
        environ = environment(overlays / str(release))
        code = subprocess.run([sys.executable, wanted], env=environ, check=False).returncode
        return f"exit code {min(abs(code), 1)}"

    return ask


def _claim(wanted: str, package: str, overlays: Path, out: Path) -> Question:
    """Return the question whether a claim about a library is right."""
    rests_on = [each[1:] for each in trials.claims() if each[0] == wanted]
    if not rests_on:
        raise Stop(f"{wanted} is not a claim that a release can answer", "study claims --basis tried lists such claims")

    def ask(release: Release) -> str:
        if release.reason:
            return release.reason
        names = {name for name, *_ in rests_on}
        answers = trials.tried(package, release.version, overlays / str(release), out / str(release), names)
        every = [changes.is_right(answers.get(name), value, tolerance) for name, value, tolerance in rests_on]
        return "the claim is right" if all(every) else "the claim is wrong"

    return ask


def _property(name: str) -> Callable[[str, str, Path, Path], Question]:
    """Return what makes questions about a property of an adapter."""
    (adapter,) = chosen_adapters((name,))

    def question(wanted: str, package: str, overlays: Path, out: Path) -> Question:
        if wanted not in PROPERTIES:
            raise Stop(f"{wanted!r} is not a property", nearest(wanted, PROPERTIES))

        def ask(release: Release) -> str:
            results = cell(adapter, [PROPERTIES[wanted]], release, overlays, out)
            return next(each.status for each in results if each.property == wanted)

        return ask

    return question


def in_order(releases: tuple[str, ...]) -> list[str]:
    try:
        return changes.in_order(releases)
    except InvalidVersion as error:
        raise Stop(str(error), "give exact releases, such as 0.18.1") from None
