"""What a stranger may give: code of models is refused, and files are opened in study.io. Ruff's S rules do the rest."""

import ast
import re

import pytest

from study.spec.arms import PACKAGE

# Calls that can run code which comes with a model or a data set.
RUN_CODE = {"from_pretrained", "load_dataset", "load_dataset_builder", "load_metric", "pipeline"}
UNPICKLES = re.compile(r"\btorch\.load\(|\bnp\.load\(|\bnumpy\.load\(")
OPENS = re.compile(r"\.read_text\(|\.read_bytes\(|\.open\(\)|\bopen\(\)|tomllib\.|json\.load\(|yaml\.safe_load")
OWN_FILES = ("probes.py", "probe_worker.py")  # they read scripts, arms and answers of this project
LINES = [
    (path, number, line)
    for path in sorted(PACKAGE.rglob("*.py"))
    if "reproductions" not in path.parts
    for number, line in enumerate(path.read_text().splitlines(), 1)
]


def found(pattern: re.Pattern, lines) -> list[tuple]:
    return [line for line in lines if pattern.search(line[2])]


def calls_that_run_code(source: str) -> list[tuple[str, bool]]:
    """Return each such call, and whether it says if it trusts the code."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in RUN_CODE]
    return [(ast.unparse(call), any(word.arg == "trust_remote_code" for word in call.keywords)) for call in named]


def test_code_of_others_is_refused_wherever_something_could_ask():
    sources = {path: path.read_text() for path, _, _ in LINES}
    calls = [call for source in sources.values() for call in calls_that_run_code(source)]
    assert len(calls) >= 4, "a config, a tokenizer, weights, data"
    assert [call for call, says in calls if not says] == []


def test_nothing_unpickles():
    assert not found(UNPICKLES, LINES)


def test_records_and_claims_are_read_by_study_io():
    of_strangers = [
        line for line in LINES if line[0].parent.name in ("records", "ledger") and line[0].name not in OWN_FILES
    ]
    assert len(of_strangers) > 1000
    assert not found(OPENS, of_strangers)


@pytest.mark.parametrize("line", ["x = T.from_pretrained(\n name)", "datasets.load_dataset(n)"])
def test_a_call_that_says_nothing_is_found(line):
    assert [says for _, says in calls_that_run_code(line)] == [False]
