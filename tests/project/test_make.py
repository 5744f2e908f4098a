"""`make` sets up what it needs each time, whatever environment it is called from."""

import os
import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

from study.sweeps import protocol
from tests.conftest import ROOT

HOSTILE = dict.fromkeys(("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PIP_TARGET"), "/elsewhere")


def test_make_sets_up_each_time_and_passes_on_no_other_environment(tmp_path):
    """Also when the packages are installed. pip refuses to install for a user inside a virtual environment."""
    (tmp_path / "bin").mkdir()
    (tmp_path / ".ready").touch()
    conf, study = tmp_path / "pip.conf", tmp_path / "bin/study"
    conf.write_text("[install]\nuser = true\n")
    install = f"{sys.executable} -m pip install --no-index --dry-run packaging"
    study.write_text(f'#!/bin/sh\necho "study $@"\nenv\n{install}\n')
    study.chmod(0o755)
    # `make test` runs this too: a make inside another prints which folder it enters.
    words = ["make", "--no-print-directory", "setup", f"VENV={tmp_path}"]
    env = os.environ | HOSTILE | {"PIP_CONFIG_FILE": str(conf)}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    first, *lines = done.stdout.splitlines()
    assert first == "study doctor --fix"
    assert not [line for line in lines if line.partition("=")[0] in HOSTILE]
    assert "packaging" in lines[-1]


# In place of Python: it writes down what it is told, and an environment that it makes has another one, and a `study`.
TOLD = """#!/bin/sh
echo "$@" >> {}
if [ "$2" = venv ]; then mkdir -p $3/bin; cp "$0" $3/bin/python; cp "$0" $3/bin/study; fi
echo torch==2.10.0
"""


def test_make_versions_asks_five_arms_with_the_oldest_and_the_newest_that_are_allowed(tmp_path):
    """pip gets the lower bounds, or none."""
    cells = protocol.cells(protocol.read(str(ROOT / ".ci/versions.toml")), "tiny")
    assert {cell.arm for cell in cells} == {"ddp", "zero2", "zero3", "zero3_cpu", "fsdp2"}
    assert len(cells) == 10, "on both tasks"
    (tmp_path / ".ci").mkdir()  # of a copy, so that no environment is made here
    for name in (".ci/versions", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    python, told = tmp_path / "python", tmp_path / "told"
    python.write_text(TOLD.format(told))
    python.chmod(0o755)
    env = os.environ | {"PYTHON": str(python)}
    subprocess.run(["bash", str(tmp_path / ".ci/versions")], env=env, capture_output=True, check=True)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["train"]
    bounded = [each for each in map(Requirement, declared) if each.name in ("torch", "transformers", "accelerate")]
    lowest = [f"{each.name}=={min(re.findall('>=([0-9.]+)', str(each.specifier)))}" for each in bounded]
    lines = told.read_text().splitlines()
    oldest, newest = (line for line in lines if "pip install" in line)
    assert re.findall(r"\S+==\S+", oldest) == lowest
    assert "==" not in newest
    sweeps = [f"sweep .ci/versions.toml --runs runs/versions-{which}" for which in ("oldest", "newest")]
    assert [line for line in lines if line.startswith("sweep")] == sweeps


@pytest.mark.parametrize("last", ["", "-to-compile", "-to-test", "-for-notebooks"])
def test_make_says_what_it_installs_before_it_does(tmp_path, last):
    """Also `make style` in a fresh clone, which needs all of it: mypy reads the types of PyTorch."""
    python, told, venv = tmp_path / "python", tmp_path / "told", tmp_path / "venv"
    python.write_text(TOLD.format(told))
    python.chmod(0o755)
    words = ["make", "--no-print-directory", f"PYTHON={python}", f"VENV={venv}", f"{venv}/.ready{last}"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert re.match(rf"Setting up {venv}, once: 1\.6 GB with PyTorch", said[0])
    assert not [line for line in said if "pip install" in line], "what it does, and not how"
    if last.startswith(("-to-test", "-for")):
        assert [line for line in said if line.startswith("Step 3: what ")]
    assert "pip install" in told.read_text()


def test_bytecode_is_made_by_one_process_before_workers_import_the_same(tmp_path):
    words = ["make", "--no-print-directory", "--dry-run", f"VENV={tmp_path}", "test"]
    lines = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    ours = [line for line in lines if "pytest " in line]
    assert [("--collect-only" in line, " -n " in line) for line in ours] == [(True, False), (False, True)], ours
