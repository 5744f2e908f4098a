"""What a stranger may give: code of models is refused, and files are opened in study.io. Ruff's S rules do the rest."""

import re

import pytest

from study.spec.arms import PACKAGE

# Calls that can run code which comes with a model or a data set.
RUNS_CODE = re.compile(r"\b(?:from_pretrained|load_dataset(?:_builder)?|load_metric|evaluate\.load|pipeline)\((.*)")
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


def test_code_of_others_is_refused_wherever_something_could_ask():
    calls = found(RUNS_CODE, LINES)
    assert len(calls) >= 4, "a config, a tokenizer, weights, data"
    assert not [call for call in calls if "trust_remote_code=" not in call[2]]


def test_nothing_unpickles():
    assert not found(UNPICKLES, LINES)


def test_records_and_claims_are_read_by_study_io():
    of_strangers = [
        line for line in LINES if line[0].parent.name in ("records", "ledger") and line[0].name not in OWN_FILES
    ]
    assert len(of_strangers) > 1000
    assert not found(OPENS, of_strangers)


@pytest.mark.parametrize("line", ["x = T.from_pretrained(name)", "evaluate.load('f1')", "datasets.load_dataset(n)"])
def test_a_call_that_says_nothing_is_found(line):
    assert found(RUNS_CODE, [(None, 1, line)])
