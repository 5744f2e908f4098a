"""What is behind a sentence of ours, by its id: where it is written, its rule, what it rests on, its test, and threads.

An id is the name of a table in a TOML file. Grep finds the rule that yields it, and its test; `places` is that grep.
"""

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

from study.core.arms import IS_CHECKOUT
from study.core.files import from_toml
from study.known.faults import TABLE, Fault, named, table
from study.known.rules import ROOT, comments_of_rule, conditions_of_rule, function_at, makes

# Neither means a sentence: the one asks for any id, and a word of the other may be one.
ANY = ("test_explained.py", "glossary.toml")


@dataclass(frozen=True)
class Explained:
    """A sentence that commands print. Names in <> are values of a training."""

    id: str
    kind: str
    sentence: str
    remedy: str
    rests_on: str
    upstream: str
    table: Path  # that has the sentence
    read_by: str  # the module that applies a rule which is a table
    is_not_filed: bool = False  # nobody here has filed it, and `upstream` is the nearest thread
    clue: str = ""  # a regular expression over a text, which decides before any code does


def of_faults() -> list[Explained]:
    """Return the faults of libraries."""
    return [of_fault(fault) for fault in table().fault]


def of_fault(fault: Fault) -> Explained:
    script = f"Shown by reproductions/{fault.script}.py" if fault.script else ""
    why = [text.rstrip(".") for text in (fault.rests_on, script, fault.why, fault.found) if text]
    about = (f"{fault.called} of {fault.package}", fault.in_releases, fault.do, ". ".join(why), fault.upstream)
    return Explained(fault.id, *about, TABLE, "study/known/which_apply.py", fault.is_not_filed)


def of_table(path: Path, kind: str, read_by: str) -> list[Explained]:
    """Return the sentences of a file whose tables have `sentence`, and perhaps `id`, `remedy`, `evidence`, `fault`."""
    text = path.read_text(encoding="utf-8")
    comments = _comments(text)
    explained = []
    for name, row in from_toml(text).items():
        if "sentence" not in row:
            continue
        evidence, remedy, upstream, is_not_filed = "", "", "", False
        if "fault" in row:
            fault = named(row["fault"])
            evidence = f"fault {fault.id}, which study explain {fault.id} shows"
            remedy, upstream, is_not_filed = fault.do, fault.upstream, fault.is_not_filed
        evidence = row.get("evidence", evidence)
        if evidence.startswith("https://"):
            evidence, upstream = "", evidence
        rests_on = ". ".join(filter(None, [evidence, comments.get(name)]))
        about = (_with_names(row["sentence"]), _with_names(row.get("remedy", remedy)), rests_on, upstream)
        id, clue = row.get("id", name), row.get("clue", "")
        explained.append(Explained(id, kind, *about, path, read_by, is_not_filed, clue))
    return explained


def _with_names(text: str) -> str:
    """Return a text with the names of its values in <>."""
    return re.sub(r"\{(\w+)[^}]*\}", lambda name: f"<{name[1].replace('_', ' ')}>", text)


def _comments(text: str) -> dict[str, str]:
    """Return by table the comments directly above it and in it: where a library does what the sentence says."""
    comments: dict[str, list[str]] = {}
    name = ""
    lines: list[str] = []  # of comments, whose table is not known yet
    for line in text.splitlines():
        if header := re.match(r'\["?([^"\[\]]+)"?\]', line):
            name = header[1]
        if line.startswith("#"):
            lines.append(line.strip("# "))
        elif line and name:
            comments.setdefault(name, []).extend(lines)
            lines = []
        else:  # an empty line ends a table
            name = ""
            lines = []
    return {name: " ".join(lines) for name, lines in comments.items() if lines}


@functools.cache
def _texts() -> dict[str, str]:
    """Return the files of the package and of its tests, which a wheel does not have."""
    texts = {}
    # Beside an installed package, tests/ would be another's.
    for folder in ("study", "tests") if IS_CHECKOUT else ("study",):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".toml") and path.name not in ANY:
                texts[str(path.relative_to(ROOT))] = path.read_text(encoding="utf-8")
    return texts


@functools.cache
def places(id: str) -> list[str]:
    """Return where the package and its tests name an id: in quotes, in brackets, or as a key.

    A test that leaves it out, as in `found - {"an_id"}`, does not ask for it.
    """
    name = re.escape(id)
    mark = re.compile(rf"""["'`\[]{name}["'`\].]|^{name} = """)
    named_at = []
    for file, text in _texts().items():
        if id not in text:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if id in line and mark.search(line) and (str(number), id) not in _left_out(file):
                named_at.append(f"{file}:{number}")
    return named_at


@functools.cache
def _left_out(file: str) -> set[tuple[str, str]]:
    """Return the texts that a test takes from others, each with its line: those of a set behind a minus sign."""
    if not (file.startswith("tests/") and file.endswith(".py")):
        return set()
    left_out = set()
    for each in _taken_away(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        for node in ast.walk(each):
            if isinstance(node, ast.Constant):
                left_out.add((str(node.lineno), str(node.value)))
    return left_out


def _taken_away(module: ast.Module) -> list[ast.expr]:
    """Return what stands behind a minus sign; of a name what the module gives it, as COSTS = {...}."""
    taken = []
    for node in ast.walk(module):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            taken.append(node.right)
    names = {each.id for each in taken if isinstance(each, ast.Name)}
    for statement in module.body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") in names:
            taken.append(statement.value)
    return taken


@dataclass(frozen=True)
class Behind:
    """Where a sentence is written, applied and tested, and what it rests on."""

    written: str
    rules: list[str]
    conditions: list[str]  # of rules in Python
    readers: list[str]  # tables that name it for another sentence
    tests: list[str]
    rests_on: str


def behind(each: Explained) -> Behind:
    """Return what is behind a sentence. Of many findings the evidence stands where the rule is.

    The rules that make it come before those that only ask for it, and it is their conditions that decide.
    """
    table = f"{each.table.relative_to(ROOT)}:"
    written, rules, readers, tests = [], [], [], []
    for place in places(each.id):
        if place.startswith(table):
            written.append(place)
        elif place.startswith("tests/"):
            tests.append(_test(place))
        elif ".py:" in place:
            rules.append(place)
        else:
            readers.append(place)
    rests_on = each.rests_on or " ".join(dict.fromkeys(filter(None, map(comments_of_rule, rules))))
    makers = [rule for rule in rules if makes(rule, each.id)]
    conditions = []
    for rule in makers or rules:
        conditions += conditions_of_rule(rule)
    rules = makers + [rule for rule in rules if rule not in makers]
    if each.clue:
        rules.insert(0, _place_of_clue(each))
        conditions.insert(0, f"the text matches the clue {each.clue}")
    return Behind(written[0], rules, conditions, readers, [*dict.fromkeys(tests)], rests_on)


def _place_of_clue(each: Explained) -> str:
    """Return where the table of a sentence has its clue."""
    lines = each.table.read_text(encoding="utf-8").splitlines()
    header = lines.index(f"[{each.id}]")
    number = next(number for number in range(header, len(lines)) if lines[number].startswith("clue = "))
    return f"{each.table.relative_to(ROOT)}:{number + 1}"


def _test(place: str) -> str:
    """Return a place in tests/ as pytest takes it: a function, or the row of a table with the files that read it."""
    file = place.rpartition(":")[0]
    if file.endswith(".py"):
        name = function_at(place)
        return f"{file}::{name}" if name else place
    readers = _readers(file)
    return f"{place}, read by {' and '.join(readers)}" if readers else place


@functools.cache
def _readers(table: str) -> list[str]:
    """Return the tests that name a table of theirs."""
    name = f'"{table.removeprefix("tests/")}"'
    return [file for file, text in _texts().items() if file.startswith("tests/") and name in text]
