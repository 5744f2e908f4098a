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
from study.conform.releases import OVERLAYS, RESULTS, cell, installed
from study.conform.suite import ADAPTERS, COMMITTED, HERE, PROPERTIES, Adapter, Property, Ranks, Result, run, table
from study.errors import Stop
from study.io.parsing import from_json
from study.io.tables import say, show


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
        return Adapter(name, self.file, self.sentence, self.settings)


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
    return [Bug(**row) for row in table("gauntlet")["bug"]]


def faults() -> list[Fault]:
    return [Fault(**row) for row in table("faults")["fault"]]


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
    out.mkdir(parents=True, exist_ok=True)
    if planted:
        _plant_all(only, out)
        return
    chosen = [each for each in bugs() if only in each.thread + each.sentence]
    if not chosen:
        raise Stop(f"no thread or sentence contains {only!r}", "leave out --only to see all")
    rows = [_caught(each, overlays, out) for each in chosen]
    (out / "bugs.json").write_text(json.dumps(rows, indent=1) + "\n")
    shown = ("thread", "before", "then", "after", "now", "property")
    show([{name: row.get(name) for name in shown} for row in rows])
    say("", f"{sum(row['caught'] for row in rows)} of {len(rows)} are seen before their fix, and not after it.")


def _caught(bug: Bug, overlays: Path, out: Path) -> dict:
    row = asdict(bug)
    del row["file"], row["unseen"]
    if not bug.property:
        return row | {"words": bug.unseen, "caught": False}
    seen = []
    for release in (bug.before, bug.after):
        wanted = [PROPERTIES[bug.property]]
        results = cell(bug.adapter(), wanted, installed(bug.library, release, overlays), overlays, out)
        seen += [result for result in results if result.property == bug.property]
        say(f"{bug.thread}: {release} {output.line(seen[-1])}")
    then, now = seen
    caught = then.status in ("fails", "refused") and now.status == "holds"
    return row | {"then": then.status, "now": now.status, "words": then.words or bug.unseen, "caught": caught}


def _plant_all(only: str, out: Path) -> None:
    path = out / "faults.json"
    rows = from_json(path.read_bytes()) if path.exists() else []
    done = [row["sentence"] for row in rows]
    for each in faults():
        if each.sentence not in done and only in each.sentence:
            rows.append(asdict(each) | planted_into(each, table("faults")["first"], out))
            path.write_text(json.dumps(rows, indent=1) + "\n")
            say(f"{len(rows[-1]['caught_by']):>3} of {rows[-1]['tried']}: {each.adapter}: {each.sentence}")
    say("", f"{sum(bool(row['caught_by']) for row in rows)} of {len(rows)} faults are caught.")


def planted_into(fault: Fault, first: list[str], out: Path) -> dict:
    """Return how many properties that hold without the fault were tried, and which do not hold with it.

    If none of those that are tried first finds it, all others are tried.
    """
    before, _ = output.load(COMMITTED / f"{fault.adapter}.json")
    fine = [PROPERTIES[result.property] for result in before if result.status == "holds"]
    done = _with_fault(fault, [each for each in fine if each.name in first], out)
    if all(result.status == "holds" for result in done):
        done += _with_fault(fault, [each for each in fine if each.name not in first], out)
    caught = [result for result in done if result.status != "holds"]
    words = caught[0].words if caught else ""
    return {"tried": len(done), "caught_by": [result.property for result in caught], "words": words}


def _with_fault(fault: Fault, properties: list[Property], out: Path) -> list[Result]:
    path, source = fault.planted()
    patch = (HERE / "templates" / "patch.py.txt").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(patch.format(path=str(path), source=source))
        with Ranks(Path(folder), out / "faults.log") as ranks:
            return run(ADAPTERS[fault.adapter], properties, ranks, output.line, shrink=False)
