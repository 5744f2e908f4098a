"""The hook of pre-commit, the action and the weekly workflow, on a sample repository."""

import os
import re
import shlex
import subprocess

import pytest
import yaml

from tests.conftest import ROOT

# A pinned list: with stage 2 and four passes, deepspeed 0.17.6 to 0.18.2 trains only with the last one.
FAULTY, RIGHT = "deepspeed==0.18.2\nnumpy==2.0.0\n", "numpy==2.0.0\naccelerate==1.15.0\n"
CONFIG = '{"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 4}'


@pytest.fixture
def sample(tmp_path):
    (tmp_path / "requirements.txt").write_text(FAULTY)
    (tmp_path / "requirements-docs.txt").write_text(RIGHT)
    (tmp_path / "ds.json").write_text(CONFIG)
    (tmp_path / "train.py").write_text("")
    return tmp_path


def run(command: str, folder, **environment: str) -> subprocess.CompletedProcess:
    # The action installs the package of its checkout. Here it is installed.
    env = os.environ | environment
    return subprocess.run(["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_the_hook_fails_where_a_fault_surely_applies(sample):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    files = sorted(path.name for path in sample.iterdir() if re.search(hook["files"], path.name))
    assert files == ["requirements-docs.txt", "requirements.txt"]
    for name, code in ("requirements-docs.txt", 0), ("requirements.txt", 1):
        # pre-commit appends the user's args, and then the file.
        done = run(f"{hook['entry']} --stage 2 --passes 4 {shlex.quote(name)}", sample)
        assert done.returncode == code, done.stdout + done.stderr
        assert code == 0 or "[last-pass-only]" in done.stdout


def test_the_action_fails_where_a_fault_surely_applies(sample):
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    install, ask = action["runs"]["steps"]
    assert install["run"] == 'python -m pip install --quiet "$ACTION"'
    defaults = {f"${{{{ inputs.{name} }}}}": each.get("default", "") for name, each in action["inputs"].items()}
    for given, code in ({"list": "requirements-docs.txt"}, 0), ({"list": "requirements.txt", "config": "ds.json"}, 1):
        values = defaults | {f"${{{{ inputs.{name} }}}}": value for name, value in given.items()}
        environment = {name: values[expression] for name, expression in ask["env"].items()}
        done = run(ask["run"], sample, **environment)
        assert done.returncode == code, done.stdout + done.stderr


def test_the_weekly_script_asks_adapters_and_files_that_exist():
    text = (ROOT / ".ci/weekly").read_text()
    assert subprocess.run(["bash", "-n", ".ci/weekly"], cwd=ROOT, check=False).returncode == 0
    names = re.search(r"for adapter in (.*);", text)[1].split()
    listed = run("study conform --json", ROOT).stdout
    assert all(f'"{name}"' in listed for name in names)
    for path in re.findall(r"tools/\S+\.py|reports/[\w-]+", text):
        assert (ROOT / path).exists(), path
    assert ".ci/weekly" in (ROOT / ".github/workflows/weekly.yml").read_text()
