"""What the suite shows and writes: lines, a table over adapters, JSON, JUnit XML, a badge, and scripts of failures."""

import json
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet

from study.conform.properties import read
from study.conform.suite import STATUSES, Adapter, Result
from study.errors import Stop
from study.io.files import why
from study.io.parsing import from_json, from_toml
from study.machine.software import version

FROM_PROPERTY = ("sentence", "source")  # are in properties.toml, and not in each file of results
REPEATED = (*FROM_PROPERTY, "adapter", "seconds")
HOLDS = {"status": "holds", "words": "", "kind": "", "shrunk": None, "ranks": (2,)}  # is not written for a release
LIBRARIES = ("torch", "deepspeed", "accelerate")
EXPLAINED = Path(__file__).with_name("explained.toml")
BADGE = Path(__file__).with_name("templates") / "badge.svg"


@dataclass(frozen=True)
class Explanation:
    """Why properties fail with some adapters: a known bug, a documented difference, or a new finding."""

    adapters: list[str]
    properties: list[str]  # ["*"]: all of them
    kind: str
    why: str
    releases: str = ""  # such as >=0.17.6,<0.18.3; empty: any
    package: str = "deepspeed"  # of these releases
    matters: str = ""  # of a bug: what a user loses

    def fits(self, result: Result, versions: dict[str, str | None]) -> bool:
        named = result.property in self.properties or self.properties == ["*"]
        return (
            result.adapter in self.adapters
            and named
            and (versions.get(self.package) or "0") in SpecifierSet(self.releases)
        )


def explanations() -> list[Explanation]:
    return [Explanation(**row) for row in from_toml(EXPLAINED.read_bytes()).get("explained", [])]


def explanation(result: Result, known: list[Explanation], versions: dict[str, str | None]) -> Explanation | None:
    """Return the explanation of a failure or a refusal with these versions. None if there is none yet."""
    return next((each for each in known if result.status in ("fails", "refused") and each.fits(result, versions)), None)


def line(result: Result) -> str:
    words = f": {result.words}" if result.words else ""
    return f"{result.status:<14}  {result.property}{words}"


def count(results: list[Result]) -> Counter[str]:
    return Counter(result.status for result in results)


def summary(results: list[Result]) -> str:
    """Return one line for a badge: how many hold of those that apply."""
    counted = count(results)
    return f"{counted['holds']} of {len(results) - counted['not applicable']} hold"


def rows(results: dict[str, list[Result]]) -> list[dict]:
    """Return a row for each adapter, with how many properties have each status."""
    return [{"adapter": name} | {status: count(each)[status] for status in STATUSES} for name, each in results.items()]


def matrix(results: dict[str, list[Result]]) -> list[dict]:
    """Return a row for each property that does not hold with every adapter, with the statuses of all adapters."""
    by_property: dict[str, dict[str, str]] = {}
    for name, each in results.items():
        for result in each:
            by_property.setdefault(result.property, {})[name] = result.status
    found = {name: statuses for name, statuses in by_property.items() if set(statuses.values()) != {"holds"}}
    return [{"property": name} | statuses for name, statuses in found.items()]


def as_json(adapter: Adapter, results: list[Result], versions: dict[str, str | None]) -> dict:
    about = {"adapter": adapter.name, "about": adapter.about, "settings": adapter.settings, "versions": versions}
    rows = [asdict(result) for result in results]
    kept = [{key: value for key, value in row.items() if key not in FROM_PROPERTY} for row in rows]
    return about | {"summary": summary(results), "results": kept}


def keep(
    folder: Path, adapter: Adapter, results: list[Result], versions: dict[str, str | None], **about: str | float
) -> None:
    """Write the results of a release: of each, what differs from a property that holds. `about` is kept with them."""
    kept = [
        {key: value for key, value in asdict(result).items() if key not in REPEATED and HOLDS.get(key) != value}
        for result in results
    ]
    folder.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(row)}" for row in kept)
    head = json.dumps({"adapter": adapter.name, "versions": versions, "reason": "", **about}, indent=1)[:-2]
    (folder / f"{adapter.name}.json").write_text(f'{head},\n "results": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def load(path: Path) -> tuple[list[Result], dict[str, str | None]]:
    """Read the results that `write` wrote, and the versions of the libraries."""
    if not path.exists():
        raise Stop(f"there is no {path}", "run this in a checkout of the study, or run study conform first")
    content = from_json(path.read_bytes())
    properties = {each.name: each for each in read()}
    results = []
    for row in content["results"]:
        about = properties.get(row["property"])  # None: since renamed
        found = {"sentence": about.sentence, "source": about.source} if about else {"sentence": "", "source": ""}
        results.append(Result(**{"adapter": content["adapter"], **HOLDS, **found, **row}))
    return results, content["versions"]


def installed() -> dict[str, str | None]:
    return {name: version(name) for name in LIBRARIES}


def write(folder: Path, adapter: Adapter, results: list[Result], versions: dict[str, str | None]) -> None:
    """Write what other programs read."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(as_json(adapter, results, versions), indent=1)
        (folder / f"{adapter.name}.json").write_text(text + "\n", encoding="utf-8")
        (folder / f"{adapter.name}.xml").write_bytes(junit(adapter.name, results))
        (folder / f"{adapter.name}.svg").write_text(badge(adapter.name, results), encoding="utf-8")
    except OSError as error:
        raise Stop(f"{folder} cannot be written ({why(error)})", "name another folder with --out") from None


def junit(name: str, results: list[Result]) -> bytes:
    """Return a JUnit report. What a library refuses, or does not have, is skipped there."""
    counted = count(results)
    skipped = counted["refused"] + counted["not applicable"]
    numbers = {"tests": str(len(results)), "failures": str(counted["fails"]), "skipped": str(skipped)}
    suite = ET.Element("testsuite", {"name": f"conform {name}"} | numbers)
    for result in results:
        case = ET.SubElement(
            suite, "testcase", classname=f"conform.{name}", name=result.property, time=f"{result.seconds:.2f}"
        )
        if result.status == "fails":
            ET.SubElement(case, "failure", message=_plain(result.words)).text = result.sentence
        elif result.status != "holds":
            ET.SubElement(case, "skipped", message=_plain(f"{result.status}: {result.words}"))
    ET.indent(suite)
    return ET.tostring(suite, encoding="utf-8", xml_declaration=True) + b"\n"


def _plain(text: str) -> str:
    """Return a text without the characters that XML does not have."""
    return "".join(letter for letter in text if letter.isprintable())


def badge(name: str, results: list[Result]) -> str:
    text = summary(results)
    left, right = 7 * len(name) + 10, 7 * len(text) + 10
    colour = "#c33" if count(results)["fails"] else "#2a2"
    places = {"left": left, "right": right, "width": left + right, "middle": left // 2, "far": left + right // 2}
    return BADGE.read_text(encoding="utf-8").format(name=name, count=text, colour=colour, **places)
