"""The wheel has all that the commands need: installed into an empty environment, and started in an empty folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import ROOT
from shaped import finished, put

ADVISE = "advise --model gpt2-xl --gpus 8 --gpu A100"
COMMANDS = {
    "--version": "zero-study",
    "arms": "zero3_nvme",
    "estimate --model bert-large": "gradients",
    ADVISE: "predicted",
    "sweep smoke --dry-run": "arms-zero3_nvme-",
    "runs runs": "good",
    "explain runs/good runs/other": "all that is tracked",
    "claims S000-13 --runs runs": "verdict",
    "operators": "operators are compiled",
    "outside": "rows of",
}


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """The `study` of an environment with the wheel in it; the dependencies are those of the tests."""
    place = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".*", "cpu-2core", "runs", "build", "*.egg-info", "tests")
    shutil.copytree(ROOT, place / "source", ignore=ignored)  # building leaves files beside the sources
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", place, place / "source"]
    subprocess.run(list(map(str, build)), check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "venv"], check=True)
    (wheel,) = place.glob("*.whl")
    python = place / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", str(wheel)], check=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(place / "venv")})
    Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.rmtree(place / "source")
    return python.with_name("study")


def run(study: Path, folder: Path, words: str, **environment: str) -> subprocess.CompletedProcess:
    kept = environment | {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    return subprocess.run(
        [str(study), *words.split()], cwd=folder, env=kept, capture_output=True, text=True, check=False
    )


def test_the_wheel_has_every_command(study, tmp_path):
    put(tmp_path / "runs", finished("good", arm="ddp"), finished("other"))
    for words, expected in COMMANDS.items():
        done = run(study, tmp_path, words)
        assert (done.returncode, done.stderr) == (0, ""), words
        assert expected in done.stdout, words


@pytest.mark.slow
def test_the_wheel_makes_a_report(study, tmp_path, home):
    put(tmp_path / "runs", finished("good", arm="ddp"), finished("other"))
    done = run(study, tmp_path, "report --runs runs --out site", XDG_CACHE_HOME=str(home))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "index.html").exists()
