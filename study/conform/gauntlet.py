"""`study gauntlet`: does the suite find what is known to be wrong? Bugs that a release mended, and planted faults.

A bug is held to its property in the release before its fix and in the one after. A fault is one changed line of a
library that is installed here; it is read in place of the line while the ranks run, and no file of the library changes.
"""

import importlib.util
import json
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from study.conform import output
from study.conform.properties import Property, read
from study.conform.releases import OVERLAYS, RESULTS, cell, installed
from study.conform.suite import ADAPTERS, HERE, Adapter, Ranks, Result, run
from study.errors import Stop
from study.io.parsing import from_json, from_toml
from study.io.tables import say, show
from study.machine.software import put_programs_on_path
from study.spec.arms import PACKAGE

COMMITTED = PACKAGE.parent / "reports" / "conform"
PATCH = """\
from importlib.machinery import SourceFileLoader

original = SourceFileLoader.get_code

def get_code(self, name):
    if self.path == {path!r}:
        return compile({source!r}, self.path, "exec")
    return original(self, name)

SourceFileLoader.get_code = get_code
"""


@dataclass(frozen=True)
class Bug:
    """A bug that a release of a library mended."""

    thread: str
    sentence: str
    before: str
    after: str
    library: str = "deepspeed"
    file: str = "deepspeed_native"
    settings: dict = field(default_factory=dict)
    property: str = ""
    unseen: str = ""  # why no property sees it here

    def adapter(self) -> Adapter:
        name = f"gauntlet-{self.thread.rpartition('#')[2]}-{self.property}"
        return Adapter(name, str(HERE / "adapters" / f"{self.file}.py"), self.settings, self.sentence)


@dataclass(frozen=True)
class Fault:
    """A change of one line of a library."""

    file: str  # in the folder of installed packages
    line: str  # a text that is in the file once
    instead: str
    adapter: str
    sentence: str

    def planted(self) -> tuple[Path, str]:
        """Return the file, and its source with the fault."""
        spec = importlib.util.find_spec(self.file.partition("/")[0])
        if spec is None or spec.origin is None:
            raise Stop(f"{self.file} is not installed", "install the library")
        path = Path(spec.origin).parents[1] / self.file
        source = path.read_text(encoding="utf-8")
        if source.count(self.line) != 1:
            raise Stop(f"{path} has {self.line!r} {source.count(self.line)} times instead of once", "mend the fault")
        return path, source.replace(self.line, self.instead)


def bugs() -> list[Bug]:
    return [Bug(**row) for row in from_toml(Path(HERE, "gauntlet.toml").read_bytes())["bug"]]


def faults() -> tuple[tuple[str, ...], list[Fault]]:
    """Return the names of the properties that are tried first, and the faults."""
    content = from_toml(Path(HERE, "faults.toml").read_bytes())
    return tuple(content["first"]), [Fault(**row) for row in content["fault"]]


def gauntlet(
    *,
    planted: bool = False,
    only: str = "",
    overlays: Path = OVERLAYS,
    out: Path = RESULTS,
) -> None:
    """Does the suite find what is known to be wrong? Run it again to continue.

    For each bug that a release mended, the release before and the one after are installed and held to one property.

    Args:
        planted: Plant faults into the libraries that are installed here instead.
        only: Only those whose thread or sentence contains this text.
        overlays: The folder for installed releases.
        out: The folder for results.
    """
    put_programs_on_path()
    out.mkdir(parents=True, exist_ok=True)
    if planted:
        _plant_all(only, out)
        return
    rows = [_caught(each, overlays, out) for each in bugs() if only in each.thread + each.sentence]
    (out / "bugs.json").write_text(json.dumps(rows, indent=1) + "\n")
    shown = ("thread", "before", "then", "after", "now", "property")
    show([{name: row[name] for name in shown} for row in rows])
    say("", f"{sum(row['caught'] for row in rows)} of {len(rows)} are seen before their fix, and not after it.")


def _caught(bug: Bug, overlays: Path, out: Path) -> dict:
    row: dict = {"thread": bug.thread, "library": bug.library, "sentence": bug.sentence, "property": bug.property}
    row |= {"settings": bug.settings, "before": bug.before, "after": bug.after}
    if not bug.property:
        return row | {"then": None, "now": None, "words": bug.unseen, "caught": False}
    wanted = [each for each in read() if each.name == bug.property]
    then, now = (
        next(
            result
            for result in cell(bug.adapter(), wanted, installed(bug.library, release, overlays), overlays, out)
            if result.property == bug.property
        )
        for release in (bug.before, bug.after)
    )
    say(f"{bug.thread}: {bug.before} {output.line(then)}", f"    {bug.after} {output.line(now)}")
    caught = then.status in ("fails", "refused") and now.status == "holds"
    return row | {"then": then.status, "now": now.status, "words": then.words or bug.unseen, "caught": caught}


def _plant_all(only: str, out: Path) -> None:
    first, every = faults()
    path = out / "faults.json"
    rows = from_json(path.read_bytes()) if path.exists() else []
    for each in every:
        if asdict(each) in [{name: row[name] for name in asdict(each)} for row in rows] or only not in each.sentence:
            continue
        rows.append(asdict(each) | planted_into(each, first, out))
        path.write_text(json.dumps(rows, indent=1) + "\n")
        say(f"{len(rows[-1]['caught_by']):>3} of {rows[-1]['tried']}: {each.adapter}: {each.sentence}")
    say("", f"{sum(bool(row['caught_by']) for row in rows)} of {len(rows)} faults are caught.")


def planted_into(fault: Fault, first: tuple[str, ...], out: Path) -> dict:
    """Return how many properties that hold without the fault were tried, and which do not hold with it.

    If none of those that are tried first finds it, all others are tried.
    """
    before, _ = output.load(COMMITTED / f"{fault.adapter}.json")
    fine = {result.property for result in before if result.status == "holds"}
    properties = [each for each in read() if each.name in fine]
    path, source = fault.planted()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(PATCH.format(path=str(path), source=source))
        done: list[Result] = []
        for chosen in (True, False):
            part = [each for each in properties if (each.name in first) == chosen]
            if not any(result.status != "holds" for result in done):
                done += _held(ADAPTERS[fault.adapter], part, Path(folder), out)
    caught = [result.property for result in done if result.status != "holds"]
    words = next((result.words for result in done if result.status != "holds"), "")
    return {"tried": len(done), "caught_by": caught, "words": words}


def _held(adapter: Adapter, properties: list[Property], overlay: Path, out: Path) -> list[Result]:
    with Ranks(overlay, out / "faults.log") as ranks:
        return run(adapter, properties, ranks, lambda result: None, shrink=False)
