"""What is kept of a run has its numbers and none of the machine's paths."""

import shutil

import pytest

from study.core.errors import Stop
from study.records import store
from study.records.runs import keep
from tests.shaped import finished, put


def test_numbers_stay_and_paths_go(tmp_path):
    paths = {"argv": ["/home/someone/study/train.py", "--run-dir", "/home/someone/runs/a", "--lr"]}
    paths |= {"requested__run_dir": "/home/someone/study/runs/a", "software__address": "https://example.org/a/b"}
    put(tmp_path / "smoke", finished("a", requested__model="google/gemma-2-9b", **paths))
    assert keep([tmp_path / "smoke"], tmp_path / "kept") == (1, [])
    kept = store.load(tmp_path / "kept/runs/smoke/a")
    assert (kept.requested.run_dir, kept.requested.model) == ("a", "google/gemma-2-9b")
    assert kept.argv == ["train.py", "--run-dir", "a", "--lr"]
    assert kept.software["address"] == "https://example.org/a/b", "not a path of a machine"
    assert "someone" not in kept.model_dump_json()
    original = store.load(tmp_path / "smoke/a")
    assert (kept.time, kept.loss, kept.memory) == (original.time, original.loss, original.memory)


def test_of_two_runs_with_one_path_the_second_is_left_out_and_named(tmp_path):
    runs = put(tmp_path / "runs", finished("good"))
    shutil.copytree(runs, tmp_path / "other/runs")
    count, (left_out,) = keep([runs, tmp_path / "other/runs"], tmp_path / "kept")
    assert (count, "rename a folder" in left_out) == (1, True)
    assert store.load(tmp_path / "kept/runs/runs/good").run_id == "good"
    with pytest.raises(Stop, match="no run below"):
        keep([tmp_path / "nothing"], tmp_path / "kept")
