"""`make` sets up what it needs each time, whatever environment it is called from."""

import os
import subprocess
import sys
import tomllib

from packaging.requirements import Requirement

from study.sweeps import protocol
from tests.conftest import ROOT

HOSTILE = dict.fromkeys(("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PIP_TARGET"), "/elsewhere")


def test_make_sets_up_each_time_and_passes_on_no_other_environment(tmp_path):
    """Also when the packages are installed. pip refuses to install for a user inside a virtual environment."""
    (tmp_path / "bin").mkdir()
    (tmp_path / ".ready").touch()
    conf, study = tmp_path / "pip.conf", tmp_path / "bin" / "study"
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


def test_make_versions_asks_five_arms_with_the_oldest_and_the_newest_that_are_allowed(tmp_path):
    """With a Python that only says what it is told: pip gets the lower bounds, or none."""
    cells = protocol.cells(protocol.read(str(ROOT / ".ci" / "versions.toml")), "tiny")
    assert {cell.arm for cell in cells} == {"ddp", "zero2", "zero3", "zero3_cpu", "fsdp2"}
    assert len(cells) == 10, "on both tasks"
    # --- a copy, so that no environment is made here
    (tmp_path / ".ci").mkdir()
    for name in (".ci/versions", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    told = tmp_path / "told"
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@" >> {told}\n'
        'if [ "$2" = venv ]; then mkdir -p $3/bin; cp "$0" $3/bin/python; cp "$0" $3/bin/study; fi\n'
        "echo torch==2.10.0\n"
    )
    python.chmod(0o755)
    words = ["bash", str(tmp_path / ".ci" / "versions")]
    done = subprocess.run(words, env=os.environ | {"PYTHON": str(python)}, capture_output=True, text=True, check=True)
    lines = told.read_text().splitlines()
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["train"]
    lowest = []
    for wanted in map(Requirement, declared):
        if wanted.name in ("torch", "transformers", "accelerate"):
            lowest += [f"{wanted.name}=={each.version}" for each in wanted.specifier if each.operator == ">="]
    oldest, newest = (line for line in lines if "pip install" in line)
    assert [word for word in oldest.split() if "==" in word] == lowest
    assert "==" not in newest
    assert [line for line in lines if line.startswith("sweep")] == [
        f"sweep .ci/versions.toml --runs runs/versions-{which}" for which in ("oldest", "newest")
    ]
    assert done.returncode == 0


def test_make_notebook_opens_the_notebooks_with_jupyter():
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", "notebook"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1].endswith("jupyter lab notebooks")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [Requirement(each).name for each in extras["notebook"]] == ["jupyter"]
