"""Each reproduction stands alone: it says what is claimed and where, runs anywhere, and prints one line of JSON."""

import ast
import json
import os
import re
import sys
import tomllib

import pytest

from tests.cases import for_each
from tests.conftest import ROOT, python

REPRODUCTIONS = ROOT / "reproductions"
# One is a training: the published script of document 002, which a protocol launches.
SCRIPTS = sorted(path for path in REPRODUCTIONS.glob("*.py") if path.stem != "as_printed")
QUICK = ("zero2_estimator_of_host_memory",)  # no process group, nothing compiled


@for_each("path", SCRIPTS, ids=lambda path: path.stem)
def test_can_be_sent_to_the_maintainers(path):
    """It says what it needs, and has nothing of this project or of a machine."""
    header, text = re.fullmatch(r"# /// script\n((?:# .*\n)+)# ///\n(.*)", path.read_text(), re.DOTALL).groups()
    installed = {name.partition("==")[0] for name in tomllib.loads(header.replace("# ", ""))["dependencies"]}
    nodes = [*ast.walk(ast.parse(text))]
    modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    assert {name.partition(".")[0] for name in modules} <= installed | set(sys.stdlib_module_names)
    assert not re.search(r"/(home|root|tmp|mnt|work)\b", text)


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=() if path.stem in QUICK else pytest.mark.slow, id=path.stem) for path in SCRIPTS]
)
def test_prints_one_answer(path, tmp_path):
    """When a stranger starts it: in a folder of its own, without this study on its path."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = python(path, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    (answer,) = [line for line in done.stdout.splitlines() if line.startswith("{") and '"found"' in line]
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"
    assert isinstance(json.loads(answer)["found"], (bool, int, float, str))
