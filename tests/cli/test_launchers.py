"""Files that start the hour elsewhere: each is what its tool takes, calls the one script, and is short."""

import importlib
import subprocess

import pytest

from study.core import files
from tests.conftest import ROOT, table

TOOLS = table("cli/launchers.toml")
ALL = [*(tool["file"] for tool in TOOLS.values()), "slurm_eight.sh"]
FREE = ("envs", "secrets", "accelerators", "limits")  # whose keys are the user's


def keys_of(value, path: str = "") -> set[tuple[str, str]]:
    """Every key with the path of its table. The items of a list have the list's path."""
    if isinstance(value, list):
        return set().union(*(keys_of(item, path) for item in value))
    if not isinstance(value, dict) or path.rpartition(".")[2] in FREE:
        return set()
    return {(path, key) for key in value}.union(*(keys_of(value[key], f"{path}.{key}".strip(".")) for key in value))


@pytest.mark.parametrize("name", TOOLS)
def test_each_key_is_one_that_the_tool_takes(name):
    tool = TOOLS[name]
    content = files.from_yaml((ROOT / "examples" / tool["file"]).read_text())
    assert {(path, key) for path, key in keys_of(content) if key not in tool["keys"].get(path, ())} == set()


PARSERS = {
    "skypilot": ("sky", lambda sky, path: sky.Task.from_yaml(str(path)).resources),
    "dstack": (
        "dstack._internal.core.models.configurations",
        lambda dstack, path: dstack.parse_apply_configuration(files.from_yaml(path.read_text())),
    ),
    "kubeflow-trainer-api": (
        "kubeflow_trainer_api.models",
        lambda models, path: models.TrainerV1alpha1TrainJob.from_dict(files.from_yaml(path.read_text())).spec.trainer,
    ),
}


@pytest.mark.parametrize("name", TOOLS)
def test_the_tool_itself_parses_it_where_it_is_installed(name):
    """Each is large, and wants other releases of what is installed here: this environment mostly has none."""
    module, parse = PARSERS[name]
    try:
        tool = importlib.import_module(module)
    except ImportError:
        return
    assert parse(tool, ROOT / "examples" / TOOLS[name]["file"])


@pytest.mark.parametrize("file", ALL)
def test_each_calls_the_one_script_and_is_short(file):
    text = (ROOT / "examples" / file).read_text()
    assert "examples/eight.sh" in text.replace("#", "")
    assert 10 <= len(text.splitlines()) <= 30
    assert "look it up" in text or "2026" in text or "your cluster says" in text, "what it costs"


@pytest.mark.parametrize("file", ["eight.sh", "slurm_eight.sh", "slurm.sh"])
def test_a_shell_reads_it(file):
    assert subprocess.run(["bash", "-n", ROOT / "examples" / file]).returncode == 0
