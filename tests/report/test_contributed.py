"""What others ran: CI takes a folder that keeps the rules, and says of each rule that another breaks."""

import shutil
from pathlib import Path

import pytest

from study.core.arms import ROOT
from study.report import contributed, site
from tests.report.contributions import POINTS, is_known, problems
from tests.shaped import COMMIT, changed, finished, put

NAME = "2026-12-01_H200x2_somebody"
SETTINGS = {"requested__init": "random", "dirty": False, "software__torch": "2.13.0"}


def test_what_this_repository_keeps_of_others_keeps_the_rules():
    found = {folder.name: problems(folder) for folder in contributed.all_folders()}
    assert {name: broken for name, broken in found.items() if broken} == {}


def contribution(tmp_path: Path, *records: dict) -> Path:
    """A folder as the archive of an hour has it, with the form filled in."""
    folder = tmp_path / NAME
    mine = records or [finished(f"mini-{arm}-12345678-r1.1", arm, gpu=True, **SETTINGS) for arm in ("ddp", "zero2")]
    put(folder / "runs", *mine)
    (folder / "README.md").write_text(contributed.form(folder / "runs", "Somebody, a group"))
    header = "gpu,gpus,cell,allocated_bytes,reserved_bytes,driver_bytes,step_s,low_s,high_s\n"
    (folder / "predicted.csv").write_text(f"{header}H200,2,mini-ddp-12345678,1000000,1,1,0.5,0.4,0.6\n")
    (folder / "predicted-here.csv").write_text(f"{header}H200,2,mini-ddp-12345678,1000000,1,1,0.25,0.2,0.3\n")
    return folder


def test_what_an_hour_leaves_keeps_the_rules(tmp_path):
    assert problems(contribution(tmp_path)) == []


RUN = finished("mini-ddp-12345678-r1.1", "ddp", gpu=True, **SETTINGS)
OTHER = finished("mini-zero2-12345678-r1.1", "zero2", gpu=True, **SETTINGS)
MEMORY = "memory__per_rank__0__"
MISTAKES = {
    "commit": ({"commit": "0" * 40}, "is not in this history"),
    "no commit": ({"commit": None}, "does not say which commit ran"),
    "changed tree": ({"dirty": True}, "or the tree was changed"),
    "losses": ({"loss__train": [7.3, 3.0, 2.4, 2.2, 2.0]}, "the losses of mini-ddp-12345678-r1.1, mini-zero2"),
    "larger than the card": ({f"{MEMORY}device_used_bytes": 151 * 10**9}, "exceed the card"),
    "reserved below allocated": ({f"{MEMORY}peak_reserved_bytes": 10**6}, "do not grow from allocated"),
    "faster than the GPU": ({"time__flops_per_rank_and_step": 1e18}, "of the GPU's peak"),
    "a path": ({"argv": ["/home/alice/train.py"]}, "a path, a name of a machine or a secret"),
    "a token": ({"argv": ["--token", "hf_" + "a" * 30]}, "a path, a name of a machine or a secret"),
    "no record": ({"status": "well"}, "is not a valid record"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_each_rule_is_asked(name, tmp_path):
    changes, words = MISTAKES[name]
    found = problems(contribution(tmp_path, changed(RUN, **changes), OTHER))
    assert len(found) == 1
    assert words in found[0]


def test_a_folder_says_who_and_what_by_its_name_and_form(tmp_path):
    folder = contribution(tmp_path)
    (folder / "README.md").write_text("Ran on node-7.cluster.internal by me.")
    wrong = folder.rename(tmp_path / "mine")
    found = problems(wrong)
    assert found[0].startswith("mine is not DATE_GPU_NAME")
    assert "does not have entity, model, hardware" in found[1]
    assert "README.md has a path, a name of a machine" in found[2]
    shutil.rmtree(wrong / "runs")
    (wrong / "runs").mkdir()
    assert "no run is done" in problems(wrong)[-1]


def test_predictions_that_cannot_be_read_are_named(tmp_path):
    folder = contribution(tmp_path)
    (folder / "predicted.csv").write_text("nothing\n1")
    assert "predicted.csv or predicted-here.csv cannot be read" in problems(folder)[0]


def test_the_form_is_empty_where_nobody_knows(tmp_path):
    text = contributed.form(tmp_path, "")
    assert all(f"| {point} |" in text for point in POINTS)
    assert "(your name" in text


def test_rows_stand_beside_both_predictions_and_the_page_names_the_contributor(tmp_path, monkeypatch):
    folder = contribution(tmp_path / "contributed")
    rows = contributed.table([folder])
    first = rows[rows["arm"] == "ddp"].iloc[0]
    assert first["contributor"] == "Somebody, a group"
    assert first["machine"] == "2 x NVIDIA H200"
    assert (first["predicted s"], first["with machine.json s"]) == (0.5, 0.25)
    assert first["step s"] > 0
    assert rows[rows["arm"] == "zero2"]["predicted s"].isna().all()
    monkeypatch.setattr(contributed, "FOLDER", folder.parent)
    own = tmp_path / "own"
    shutil.copytree(folder / "runs", own)
    page = site.write_contributed(tmp_path / "page", [own]).read_text()
    assert "Contributions so far: 1." in page
    assert page.index("Your hour") < page.index('id="everybody"') < page.index("Somebody, a group")
    assert "<td>you</td>" in page


def test_a_commit_is_known_by_the_history():
    assert is_known(COMMIT)
    assert (ROOT / "reports/contributed/README.md").exists()
