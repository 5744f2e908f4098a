"""Files that start the hour elsewhere: each is what its tool takes, calls the one script, and is short."""

import importlib
import os
import shutil
import signal
import subprocess
import time

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


STUB = "#!/bin/sh\necho python $* >>said\ncase $1 in -c) exit 0;; esac\n"
HOUR = (
    "trap 'echo terminated >>said; exit 130' TERM\ncase \"$*\" in *wait*) sleep 20 & wait $!;; *hour*) exit 3;; esac\n"
)


@pytest.fixture
def checkout(tmp_path):
    """A folder with the script, and programs in place of make and Python that write down how they are called."""
    programs = tmp_path / "programs"
    for folder in ("examples", "programs", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "examples/eight.sh", tmp_path / "examples")
    for path, text in {
        programs / "make": "#!/bin/sh\necho make $* >>said\nexit 1\n",
        programs / "python3": STUB + HOUR,
        tmp_path / ".venv/bin/python": STUB + HOUR,
    }.items():
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def start(checkout, *words) -> subprocess.Popen:
    environment = os.environ | {"PATH": f"{checkout / 'programs'}:{os.environ['PATH']}"}
    return subprocess.Popen(["bash", "examples/eight.sh", *words], cwd=checkout, env=environment)


def test_the_script_sets_up_and_hands_on_words_and_the_exit_code(checkout):
    """An operator that does not compile, where make ends with 1, does not end the hour."""
    assert start(checkout, "--minutes", "5").wait(30) == 3
    said = (checkout / "said").read_text().splitlines()
    assert [line for line in said if line.startswith("make setup PYTHON=python3 CONSTRAIN=")]
    assert said[-1] == "python -m study.cli hour --minutes 5"


def test_the_script_hands_on_the_end_of_its_machine(checkout):
    hour = start(checkout, "wait")
    while "hour wait" not in ((checkout / "said").read_text() if (checkout / "said").exists() else ""):
        time.sleep(0.1)
    time.sleep(0.5)
    hour.send_signal(signal.SIGTERM)
    assert hour.wait(10) == 130
    assert (checkout / "said").read_text().endswith("terminated\n")


def test_the_script_takes_a_pack_where_there_is_no_network(checkout):
    """Its wheels are installed once, what was compiled is unpacked, and what compiles is packed."""
    (checkout / "gpu-pack/wheels").mkdir(parents=True)
    (checkout / "gpu-pack/pack.json").write_text("{}")
    (checkout / "gpu-pack/wheels/a.whl").touch()
    for _ in range(2):
        (checkout / ".gpu/site").mkdir(parents=True, exist_ok=True)
        assert start(checkout).wait(30) == 3
        shutil.copy(checkout / "gpu-pack/pack.json", checkout / ".gpu/site")  # the stub installs nothing
    said = (checkout / "said").read_text().splitlines()
    assert len([line for line in said if "-m pip install" in line and "gpu-pack/wheels/a.whl" in line]) == 1
    assert said[-1] == "python -m study.cli hour --pack gpu-pack"
    assert (checkout / "gpu-pack/compiled.tar.gz").exists()
