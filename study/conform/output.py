"""What the suite shows and writes: lines, a table over adapters, JSON, JUnit XML, a badge, and scripts of failures."""

import functools
import json
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
from packaging.specifiers import SpecifierSet

from study.conform.suite import HERE, LIBRARIES, PROPERTIES, STATUSES, Adapter, Result, table
from study.core.errors import Stop
from study.core.files import why
from study.core.parsing import from_json
from study.core.software import version

Versions = dict[str, str | None]
DEFAULT = asdict(Result("", ""))  # is not written


@dataclass(frozen=True)
class Explanation:
    """Why properties fail with some adapters: a known bug, a documented difference, or a new finding."""

    adapters: list[str]
    properties: list[str]  # ["*"]: all of them
    kind: str
    why: str
    gpu: str  # whether a GPU takes the same path: yes, no, unknown
    releases: str = ""  # such as >=0.17.6,<0.18.3; empty: any
    package: str = "deepspeed"  # of these releases

    def __str__(self) -> str:
        return f"{self.why} Does a GPU take the same path: {self.gpu}."


@functools.cache
def explanations() -> list[Explanation]:
    return [Explanation(**row) for row in table("explained")["explained"]]


def explanation(result: Result, versions: Versions) -> Explanation | None:
    """Return the explanation of a failure or a refusal with these versions. None if there is none yet."""
    if result.status not in ("fails", "refused"):
        return None
    for each in explanations():
        named = result.adapter in each.adapters and (result.property in each.properties or each.properties == ["*"])
        if named and (versions.get(each.package) or "0") in SpecifierSet(each.releases):
            return each
    return None


def line(result: Result) -> str:
    return f"{result.status:<14}  {result.property}{': ' if result.words else ''}{result.words}"


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
    frame = pd.DataFrame([vars(result) for each in results.values() for result in each])
    wide = frame.pivot(index="property", columns="adapter", values="status")
    wide = wide.loc[frame["property"].unique(), frame["adapter"].unique()]
    return wide[(wide != "holds").any(axis=1)].reset_index().to_dict("records")


def as_json(adapter: Adapter, results: list[Result], versions: Versions) -> dict:
    """Return what other programs read. Of a result, what is as in most (one that holds on two ranks) is left out."""
    left_out = {"adapter", "seconds"}
    rows = [
        {key: value for key, value in asdict(each).items() if key not in left_out and value != DEFAULT[key]}
        for each in results
    ]
    about = {"adapter": adapter.name, "about": adapter.about, "settings": adapter.settings, "versions": versions}
    return about | {"summary": summary(results), "results": rows}


def keep(folder: Path, adapter: Adapter, results: list[Result], versions: Versions, **about: str | float) -> None:
    """Write results as JSON, one in a line. `about` is kept with them."""
    content = as_json(adapter, results, versions) | about
    lines = ",\n".join(f"  {json.dumps(row)}" for row in content.pop("results"))
    folder.mkdir(parents=True, exist_ok=True)
    head = json.dumps(content, indent=1)[:-2]
    (folder / f"{adapter.name}.json").write_text(f'{head},\n "results": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def load(path: Path) -> tuple[list[Result], Versions]:
    """Read the results that `keep` wrote, and the versions of the libraries."""
    if not path.exists():
        raise Stop(f"there is no {path}", "run this in a checkout of the study, or run study conform first")
    content = from_json(path.read_bytes())
    rows = [row | {"ranks": tuple(row.get("ranks", (2,)))} for row in content["results"]]
    return [Result(content["adapter"], **row) for row in rows], content["versions"]


def installed() -> Versions:
    return {name: version(name) for name in LIBRARIES}


def named(versions: Versions) -> str:
    return ", ".join(f"{name} {release}" for name, release in versions.items() if release)


def write(folder: Path, adapter: Adapter, results: list[Result], versions: Versions) -> None:
    """Write JSON, JUnit XML and a badge."""
    try:
        keep(folder, adapter, results, versions)
        (folder / f"{adapter.name}.xml").write_bytes(junit(adapter.name, results))
        (folder / f"{adapter.name}.svg").write_text(badge(adapter.name, results), encoding="utf-8")
    except OSError as error:
        raise Stop(f"{folder} cannot be written ({why(error)})", "name another folder with --out") from None


def junit(name: str, results: list[Result]) -> bytes:
    """Return a JUnit report. What a library refuses, or does not have, is skipped there."""
    counted = count(results)
    skipped = counted["refused"] + counted["not applicable"]
    numbers = {"tests": len(results), "failures": counted["fails"], "skipped": skipped}
    suite = ET.Element("testsuite", {key: str(value) for key, value in numbers.items()}, name=f"conform {name}")
    for result in results:
        about = {"name": result.property, "time": f"{result.seconds:.2f}"}
        case = ET.SubElement(suite, "testcase", about, classname=f"conform.{name}")
        words = "".join(letter for letter in result.words if letter.isprintable())  # XML does not have the others
        if result.status == "fails":
            ET.SubElement(case, "failure", message=words).text = PROPERTIES[result.property].sentence
        elif result.status != "holds":
            ET.SubElement(case, "skipped", message=f"{result.status}: {words}")
    ET.indent(suite)
    return ET.tostring(suite, encoding="utf-8", xml_declaration=True) + b"\n"


def badge(name: str, results: list[Result]) -> str:
    text = summary(results)
    left, right = 7 * len(name) + 10, 7 * len(text) + 10
    colour = "#c33" if count(results)["fails"] else "#2a2"
    places = {"left": left, "right": right, "width": left + right, "middle": left // 2, "far": left + right // 2}
    template = (HERE / "templates" / "badge.svg").read_text(encoding="utf-8")
    return template.format(name=name, count=text, colour=colour, **places)
