"""What is behind a sentence of ours, by its id: where it is written, its rule, what it rests on, its test, and threads.

An id is the name of a table in a TOML file. Grep finds the rule that yields it, and its test; `places` is that grep.
"""

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

from study.core.files import from_toml
from study.known.faults import TABLE, Fault, named, table

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Explained:
    """A sentence that commands print. Names in braces are values of a training."""

    id: str
    kind: str
    sentence: str
    remedy: str
    rests_on: str
    upstream: str
    table: Path  # that has the sentence
    read_by: str  # the module that applies a rule which is a table


def of_faults() -> list[Explained]:
    """Return the faults of libraries."""
    return [of_fault(fault) for fault in table().fault]


def of_fault(fault: Fault) -> Explained:
    script = f"Shown by reproductions/{fault.script}.py" if fault.script else ""
    why = [text.rstrip(".") for text in (fault.rests_on, script, fault.why, fault.found) if text]
    about = (f"fault of {fault.package}", fault.in_releases, fault.do, ". ".join(why), fault.upstream)
    return Explained(fault.id, *about, TABLE, "study/known/which_apply.py")


def of_table(path: Path, kind: str, read_by: str) -> list[Explained]:
    """Return the sentences of a file whose tables have `sentence`, and perhaps `id`, `remedy`, `evidence`, `fault`."""
    text = path.read_text()
    explained = []
    for name, row in from_toml(text).items():
        if "sentence" not in row:
            continue
        evidence, remedy, upstream = row.get("evidence", ""), row.get("remedy", ""), ""
        if "fault" in row:
            fault = named(row["fault"])
            evidence = evidence or f"fault {fault.id}, which study explain {fault.id} shows"
            remedy, upstream = remedy or fault.do, fault.upstream
        if evidence.startswith("https://"):
            evidence, upstream = "", evidence
        rests_on = ". ".join(filter(None, [evidence, _comment(text, name)]))
        explained.append(
            Explained(row.get("id", name), kind, row["sentence"], remedy, rests_on, upstream, path, read_by)
        )
    return explained


def _comment(text: str, name: str) -> str:
    """Return the comment that stands directly above a table: where a library does what the sentence says."""
    above = re.search(rf"((?:^#.*\n)+)\[(?:{re.escape(name)}|\"{re.escape(name)}\")\]", text, re.MULTILINE)
    return " ".join(line.strip("# ") for line in above[1].splitlines()) if above else ""


def comments_of_rule(place: str) -> str:
    """Return the comments of a function above one of its lines, FILE:LINE. They say what a rule rests on."""
    file, _, number = place.rpartition(":")
    text = (ROOT / file).read_text()
    last = int(number)
    around = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    begins = [node.lineno for node in around if node.lineno <= last <= (node.end_lineno or last)]
    above = text.splitlines()[max(begins, default=last) : last]
    return " ".join(line.strip(" #") for line in above if line.lstrip().startswith("# "))


@functools.cache
def _lines() -> list[tuple[str, str]]:
    """Return the lines of the package and of its tests, which a wheel does not have, each with its place."""
    return [
        (f"{path.relative_to(ROOT)}:{number}", line)
        for folder in ("study", "tests")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".toml")
        for number, line in enumerate(path.read_text().splitlines(), 1)
    ]


def places(id: str) -> list[str]:
    """Return where the package and its tests name an id: in quotes, in brackets, or as a key."""
    name = re.escape(id)
    mark = re.compile(rf"""["'`\[]{name}["'`\].]|^{name} = """)
    return [place for place, line in _lines() if id in line and mark.search(line)]


@dataclass(frozen=True)
class Behind:
    """Where a sentence is written, applied and tested, and what it rests on."""

    written: str
    rules: list[str]
    readers: list[str]  # tables that name it for another sentence
    tests: list[str]
    rests_on: str


def behind(each: Explained) -> Behind:
    """Return what is behind a sentence. Of many findings the evidence stands where the rule is."""
    table = f"{each.table.relative_to(ROOT)}:"
    written, rules, readers, tests = [], [], [], []
    for place in places(each.id):
        if place.startswith(table):
            written.append(place)
        elif place.startswith("tests/"):
            tests.append(place)
        elif ".py:" in place:
            rules.append(place)
        else:
            readers.append(place)
    rests_on = each.rests_on or " ".join(dict.fromkeys(filter(None, map(comments_of_rule, rules))))
    return Behind(written[0], rules, readers, tests, rests_on)
