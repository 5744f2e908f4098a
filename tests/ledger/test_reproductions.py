"""Each reproduction stands alone: it says what is claimed and where, runs anywhere, and prints one line of JSON."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT

from study.ledger import texts as ledger
from study.watch.findings import texts

REPRODUCTIONS = ROOT / "reproductions"
# One is a training: the published script of document 002, which a protocol launches.
SCRIPTS = sorted(path for path in REPRODUCTIONS.glob("*.py") if path.stem != "as_printed")
QUICK = ("zero2_estimator_at_the_update",)  # no process group, nothing compiled
LONGEST = 50  # lines


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_can_be_sent_to_the_maintainers(path):
    """Short, with the claim, its place and what happens; without anything of this project or of a machine."""
    text = path.read_text()
    tree = ast.parse(text)
    assert re.search(r"What happens \((deepspeed|accelerate|transformers) \d+\.\d+\.\d+", ast.get_docstring(tree) or "")
    header, text = re.fullmatch(r"# /// script\n((?:# .*\n)+)# ///\n(.*)", text, re.DOTALL).groups()
    installed = {name.partition("==")[0] for name in tomllib.loads(header.replace("# ", ""))["dependencies"]}
    assert len(text.splitlines()) <= LONGEST
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert {name.partition(".")[0] for name in modules} <= installed | set(sys.stdlib_module_names)
    assert not re.search(r"/(home|root|tmp|mnt|work)\b", text)


def test_every_reproduction_decides_something():
    """A fault, a claim, a finding of `study diagnose`, or a question that releases are asked."""
    named = {fault.script for fault in ledger.faults()}
    named |= {each.script for claim in ledger.claims() for each in claim.evidence if each.kind == "reproduction"}
    named |= {Path(text.get("evidence", "")).stem for text in texts().values()}
    asked = (ROOT / "reports" / "conform" / "answers.csv").read_text()  # and those that take long, once:
    asked += (ROOT / "reports" / "cpu-2core" / "trials.json").read_text()
    named |= {path.stem for path in SCRIPTS if path.stem in asked}
    assert {path.stem for path in SCRIPTS} <= named


def run(path, folder) -> dict:
    """What a script prints when a stranger starts it: in a folder of its own, without this study on its path."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, path], cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = [line for line in done.stdout.splitlines() if line.startswith("{") and '"found"' in line]
    assert len(answers) == 1, done.stdout
    assert list(folder.iterdir()) == [], "it leaves nothing behind"
    return json.loads(answers[0])


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=() if path.stem in QUICK else pytest.mark.slow, id=path.stem) for path in SCRIPTS]
)
def test_prints_one_answer(path, tmp_path):
    assert isinstance(run(path, tmp_path)["found"], (bool, int, float, str))
