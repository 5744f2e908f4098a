"""Public scripts answer, or are refused in one sentence that names the line: the list, and those that are here."""

import os
import re
from pathlib import Path

import pytest

from tests.rehearsal.material import make
from tests.rehearsal.pairs import PUBLIC, public_pair, row, weights
from tests.rehearsal.public import SCRIPTS, rehearse

FOLDER = os.environ.get("STUDY_PUBLIC")  # with checkouts of the repositories, by their names
INSTALLED = ("trl/scripts/sft.py", "trl/scripts/dpo.py")  # which come with a package


def test_of_twenty_public_scripts_fourteen_answer_and_the_others_are_told_their_line():
    assert len(SCRIPTS) >= 20
    assert sum("answered_bytes" in script for script in SCRIPTS) >= 14
    for script in SCRIPTS:
        assert script["repository"].startswith("https://github.com/")
        assert re.fullmatch(r"[0-9a-f]{40}|v[\d.]+", script["commit"])
        assert ("answered_bytes" in script) != bool(re.match(r"\w+\.py:\d+: ", script.get("refused", "")))


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    make(folder)
    return folder


def check(script: dict, material: Path) -> None:
    answer = rehearse(script, Path(FOLDER or "."), material)
    if "answered_bytes" in script:
        assert answer["peak_bytes"] == pytest.approx(script["answered_bytes"], rel=0.01)
    else:
        error = answer["error"]
        assert f"{error['where']}: {error['message']}".startswith(script["refused"])


@pytest.mark.parametrize("path", [INSTALLED[0], pytest.param(INSTALLED[1], marks=pytest.mark.slow)])
def test_a_script_of_a_package_answers_as_it_is(path, material):
    script = next(each for each in SCRIPTS if each["path"] == path)
    check(script | {"module": path.removesuffix(".py").replace("/", ".")}, material)


@pytest.mark.slow
@pytest.mark.skipif(FOLDER is None, reason="STUDY_PUBLIC names no folder with checkouts")
@pytest.mark.parametrize("script", SCRIPTS, ids=[script["path"] for script in SCRIPTS])
def test_a_public_script_does_what_the_list_says(script, material):
    path = Path(FOLDER, script["repository"].rpartition("/")[2], script["path"])
    if not path.exists():
        pytest.skip("it is not there")
    check(script, material)


@pytest.mark.slow
@pytest.mark.skipif(FOLDER is None, reason="STUDY_PUBLIC names no folder with checkouts")
@pytest.mark.parametrize(("name", "arm"), [(name, arm) for name, (_, _, arms) in PUBLIC.items() for arm in arms])
def test_a_public_script_holds_what_a_real_rank_holds(name, arm, material, tmp_path):
    weights(material)
    found = row(name, arm, *public_pair(name, arm, Path(FOLDER), material, tmp_path / "real"))
    assert abs(float(found["off"])) < 0.005
    assert float(found["role_off"]) < 0.01
    assert float(found["part_off"]) < 0.005
