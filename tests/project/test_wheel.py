"""The wheel has all that the commands need: installed into an empty environment, and started in an empty folder."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from study.configs.sentences import sentences
from tests.conftest import ROOT, table
from tests.shaped import finished, put

TYPED = table("project/light.toml")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".*", "cpu-2core", "runs", "build", "*.egg-info", "tests")
    shutil.copytree(ROOT, place / "source", ignore=ignored)  # building leaves files beside the sources
    words = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", place, place / "source"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *words], check=True)
    return next(place.glob("*.whl"))


def needed_by(name: str, done: dict[str, metadata.Distribution]) -> dict[str, metadata.Distribution]:
    """Return the distributions that an install of one brings along, by name."""
    if name not in done:
        done[name] = metadata.distribution(name)
        for need in map(Requirement, done[name].requires or []):
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                needed_by(canonicalize_name(need.name), done)
    return done


@pytest.fixture(scope="module")
def light(wheel, tmp_path_factory) -> Path:
    """The `study` of an environment with what `pip install` brings along, which is without torch."""
    venv = tmp_path_factory.mktemp("light")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", venv / "bin/python"]
    subprocess.run([*pip, "install", "--no-deps", wheel], check=True)
    done = needed_by("zero-study", {})
    del done["zero-study"]
    assert not {"torch", "deepspeed", "datasets"} & done.keys()
    for distribution in done.values():
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            Path(sysconfig.get_path("purelib", vars={"base": venv}), top).symlink_to(distribution.locate_file(top))
    return venv / "bin/study"


def started(light: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run([light, *words], cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_an_installed_package_explains_every_sentence_and_says_where_tests_are(light, tmp_path):
    """Sources and tables are in it, tests are not."""
    done = started(light, tmp_path, "explain", *(each.id for each in sentences()))
    assert (done.returncode, done.stderr) == (0, "")
    assert {*re.findall("Test: (.*)", done.stdout)} == {
        "in tests/ of the repository, which an installed package does not have"
    }


@pytest.mark.parametrize("words", TYPED["light"] | TYPED["heavy"])
def test_the_light_install_reads_predicts_and_judges_and_says_what_it_lacks(words, light, tmp_path):
    put(tmp_path / "runs", finished("good", arm="ddp"), finished("other"))
    done = started(light, tmp_path, *words.split())
    assert "Traceback" not in done.stderr
    if words in TYPED["heavy"]:
        assert done.returncode == 2
        assert done.stderr.startswith(f"this needs {TYPED['heavy'][words]}, which the light install does not have")
    else:
        assert done.returncode in (0, 1), done.stderr  # 1: runs that diagnose or doctor finds fault with
        assert TYPED["light"][words] in " ".join(done.stdout.split())


def test_the_wheel_has_what_its_commands_read(wheel):
    packed = {Path(name).name for name in zipfile.ZipFile(wheel).namelist()}
    for folder in ("accelerate_configs", "study/report/templates"):
        assert {path.name for path in (ROOT / folder).rglob("*.*")} <= packed
    # 2.01 MB on 30 November 2026. The light install is to stay light.
    assert wheel.stat().st_size < 2.1e6
    assert "calculator.json" not in packed, "of a page that only a checkout builds"
