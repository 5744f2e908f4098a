"""`make` sets up what it needs each time, whatever environment it is called from."""

import os
import subprocess
import sys

from conftest import ROOT

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
