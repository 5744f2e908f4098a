"""The wheel has all that the commands need: installed into an empty environment, and started in an empty folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from shaped import finished, put

LIGHT = {
    "--version": "zero-study",
    "arms": "0 of 30 arms can run",
    "sweep smoke --dry-run": "0 of 31 cells are possible",
    "estimate --model bert-large": "gradients",
    "advise --model llama3-8b --gpus 8 --gpu H100": "predicted",
    "runs runs": "good",
    "claims P1-17 --runs runs": "need other runs",
    "claims S002-25": "S002-25",
    "diff a.yaml b.json": "stage: A 2, B 3",
    "diagnose runs/good": "good",
    "compare runs": "ddp",
    "doctor": "torch",
}
HEAVY = {  # what needs more says so in one sentence
    "report --runs runs": "IPython",
    "virtual": "accelerate",
    "sweep smoke": "accelerate",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".*", "cpu-2core", "runs", "build", "*.egg-info", "tests")
    shutil.copytree(ROOT, place / "source", ignore=ignored)  # building leaves files beside the sources
    words = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", place, place / "source"]
    subprocess.run([sys.executable, "-m", "pip", *map(str, words)], check=True)
    shutil.rmtree(place / "source")
    return next(place.glob("*.whl"))


def environment(wheel: Path, folder: Path) -> tuple[Path, Path]:
    """A new environment with the wheel: its `study`, and the folder of its packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", folder / "bin" / "python"]
    subprocess.run([*map(str, pip), "install", "--no-deps", str(wheel)], check=True)
    return folder / "bin" / "study", Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))


@pytest.fixture(scope="module")
def study(wheel, tmp_path_factory) -> Path:
    """The `study` of an environment with the wheel in it; the dependencies are those of the tests."""
    program, packages = environment(wheel, tmp_path_factory.mktemp("whole") / "venv")
    (packages / "dependencies.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path))
    return program


def needed_by(name: str, done: dict[str, metadata.Distribution]) -> dict[str, metadata.Distribution]:
    """The distributions that an install of one brings along, by name."""
    if name not in done:
        done[name] = metadata.distribution(name)
        for need in map(Requirement, done[name].requires or []):
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                needed_by(canonicalize_name(need.name), done)
    return done


@pytest.fixture(scope="module")
def light(wheel, tmp_path_factory) -> Path:
    """The `study` of an environment with what `pip install` brings along, which is without torch."""
    program, packages = environment(wheel, tmp_path_factory.mktemp("light") / "venv")
    done: dict[str, metadata.Distribution] = {}
    for need in map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]):
        needed_by(canonicalize_name(need.name), done)
    assert not {"torch", "deepspeed", "datasets"} & done.keys()
    for distribution in done.values():
        tops = {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}
        for top in tops:
            (packages / top).symlink_to(distribution.locate_file(top))
    return program


def run(study: Path, folder: Path, words: str, **environment: str) -> subprocess.CompletedProcess:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [str(study), *words.split()]
    return subprocess.run(command, cwd=folder, env=kept | environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("words", LIGHT)
def test_the_light_install_reads_predicts_and_judges(words, light, tmp_path):
    put(tmp_path / "runs", finished("good", arm="ddp"), finished("other"))
    (tmp_path / "a.yaml").write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\n")
    (tmp_path / "b.json").write_text('{"zero_optimization": {"stage": 3}}')
    done = run(light, tmp_path, words)
    assert "Traceback" not in done.stderr
    assert LIGHT[words] in done.stdout, done.stderr


@pytest.mark.parametrize("words", HEAVY)
def test_the_light_install_says_what_it_lacks(words, light, tmp_path):
    put(tmp_path / "runs", finished("good", arm="ddp"))
    done = run(light, tmp_path, words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"this needs {HEAVY[words]}, which the light install does not have")
    assert "zero-study[train,report]" in done.stderr


@pytest.mark.slow
def test_the_wheel_makes_a_report(study, tmp_path, home):
    put(tmp_path / "runs", finished("good", arm="ddp"), finished("other"))
    done = run(study, tmp_path, "report --runs runs --out site", XDG_CACHE_HOME=str(home))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "index.html").exists()
