"""`make` sets up what it needs each time, whatever environment it is called from."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

HOSTILE = {
    "VIRTUAL_ENV": "/elsewhere",
    "CONDA_PREFIX": "/elsewhere/conda",
    "CONDA_DEFAULT_ENV": "base",
    "PYTHONPATH": "/elsewhere/lib",
    "PYTHONHOME": "/elsewhere",
    "PIP_TARGET": "/elsewhere/lib",
}


@pytest.fixture
def make(tmp_path):
    """A function that calls `make setup` with a `study` that runs something else."""
    (tmp_path / "bin").mkdir()
    (tmp_path / ".ready").touch()

    def run(instead: str, **env: str) -> str:
        study = tmp_path / "bin" / "study"
        study.write_text(f"#!/bin/sh\n{instead}\n")
        study.chmod(0o755)
        # `make test` runs this too: a make inside another prints which folder it enters.
        words = ["make", "--no-print-directory", "setup", f"VENV={tmp_path}"]
        env = os.environ | env
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_make_sets_up_each_time_and_passes_on_no_other_environment(make):
    """Operators are looked at also when the packages are installed."""
    assert make('echo "study $@"') == "study doctor --fix\n"
    lines = make("env", **HOSTILE).splitlines()
    assert not [line for line in lines if line.partition("=")[0] in HOSTILE]


def test_make_installs_into_its_environment_whatever_pip_conf_says(make, tmp_path):
    """pip refuses to install for a user inside a virtual environment."""
    conf = tmp_path / "pip.conf"
    conf.write_text("[install]\nuser = true\n")
    install = f"{sys.executable} -m pip install --no-index --dry-run packaging"
    assert "packaging" in make(install, PIP_CONFIG_FILE=str(conf))
