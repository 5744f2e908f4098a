"""Runs side by side: what is pooled, what never is, and what is said of the rest. The records are invented."""

import itertools
import shutil
from pathlib import Path

import pytest
import shaped

from study.core.errors import Stop
from study.records import runs
from study.records.compare import Comparison, notes
from study.records.compare import compare as compare_runs

GPU = {"name": "NVIDIA H200", "memory_bytes": 150 * 10**9}
OFFLOAD = {"stage": 3, "reduce_bucket_size": 6553600, "offload_optimizer": {"device": "nvme", "nvme_path": "/run-1"}}
CHANGES = {
    "hardware__cpu": "Some CPU",
    "hardware__host_memory_bytes": 24 * 2**30 + 12345,
    "requested__log_every": 10,
    "observed__deepspeed": {"zero_optimization": OFFLOAD},
    "loss__train": [0.7, 0.5],
    "loss__eval": [{"step": 4, "eval_loss": 0.25}],
    "time__step_s": [0.1],
    "memory__per_rank": [{"peak_allocated_bytes": None}] * 2,
    "memory__components": {"per_rank": [{"tracked_peak_bytes": 3e6}, {"tracked_peak_bytes": 5e6}]},
}


@pytest.fixture
def put(tmp_path):
    """A function that writes a record into a run folder of its own, below one of the folders to compare."""
    count = itertools.count()

    def write(below: str = "runs", **changes) -> Path:
        name = f"run-{next(count):06}"
        shaped.put(tmp_path / below, shaped.finished(name, "zero3_nvme", **CHANGES | changes))
        return tmp_path / below / name

    return write


@pytest.fixture
def compared_of(put, tmp_path):
    """A function that writes a record for each of some changes, and compares all that there are by then."""
    return lambda *changes: [put(**each) for each in changes] and compare([tmp_path])


def compare(folders: list) -> Comparison:
    return compare_runs(runs.load(folders, every_folder_has_runs=True))


def environments(compared) -> list[str]:
    return [row["environment"] for row in compared.rows]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("software__torch", "2.14.0", "torch 2.14.0"),
        ("hardware__devices", [GPU, GPU], "devices 2 x NVIDIA H200"),
        ("hardware__cpu", "Other CPU", "cpu Other CPU"),
        ("hardware__cores", 4, "cores 4"),
        ("hardware__host_memory_bytes", 32 * 2**30, "host GiB 32"),
        ("hardware__driver", "580.1", "driver 580.1"),
        ("measure_version", 99, "measure_version 99"),
        ("commit", None, "commit -"),
        ("dirty", True, f"commit {shaped.COMMIT[:12]} changed"),
    ],
)
def test_another_environment_is_another_row(compared_of, field, value, words):
    compared = compared_of({"time__step_s": [0.1]}, {field: value, "time__step_s": [0.3]})
    assert environments(compared) == ["A", "B"]
    assert [row["runs"] for row in compared.rows] == [1, 1]
    assert [row["s/step"] for row in compared.rows] == [0.1, 0.3]
    assert [row["vs A"] for row in compared.rows] == [1, pytest.approx(3)]
    legend = [line for line in notes(compared) if line.startswith(("A: ", "B: "))]
    assert legend[1] == f"B: {words}"  # this field and no other
    assert legend[0].count(",") == 0


@pytest.mark.parametrize(
    ("field", "value", "column"),
    [
        ("requested__arm", "zero3", "arm"),
        ("requested__lr", 5e-4, "lr"),
        ("observed__ranks", 4, "ranks"),
        ("observed__data_checksum", "bb", "data_checksum"),
        ("observed__deepspeed__zero_optimization__reduce_bucket_size", 5e8, "zero_optimization.reduce_bucket_size"),
    ],
)
def test_another_setting_is_another_row(compared_of, field, value, column):
    compared = compared_of({}, {field: value})
    assert environments(compared) == ["A", "A"]
    assert [row[column] for row in compared.rows].count(value) == 1
    before = list(compared.rows[0])[: list(compared.rows[0]).index("environment")]
    assert before == list(dict.fromkeys(["arm", column]))


def test_paths_and_what_a_boot_changes_do_not_split_a_row(compared_of):
    same = {
        "requested__seed": 43,
        "requested__run_dir": "/elsewhere",
        "requested__nvme_dir": "/disk",
        "requested__config_file": "/elsewhere/zero3_nvme.yaml",
        "requested__log_every": 1,
        "requested__threads": None,
        "observed__deepspeed__zero_optimization__offload_optimizer__nvme_path": "/there/run-2",
        "hardware__host_memory_bytes": 24 * 2**30 - 54321,
        "hardware__disk_free_bytes": 1,
        "software__datasets": None,
    }
    (row,) = compared_of({}, *({field: value} for field, value in same.items())).rows
    assert row["runs"] == 1 + len(same)


def test_data_in_another_folder_is_the_same_data_if_its_rows_are(compared_of):
    here, elsewhere = (
        {"requested__data": f"/{place}/imdb", "requested__tokenizer": f"/{place}/bert"} for place in ("here", "there")
    )
    other_rows = elsewhere | {"observed__data_checksum": "bb"}
    assert [row["runs"] for row in compared_of(here, elsewhere, other_rows).rows] == [2, 1]


def test_seeds_are_pooled_and_counted(compared_of):
    each = [(1, 0.3, 0.6), (2, 0.1, 0.4), (3, 0.2, 0.5), (3, 0.9, 0.5)]
    fields = ("requested__seed", "time__step_s", "loss__train")
    (row,) = compared_of(*(dict(zip(fields, (seed, [s], [loss]), strict=True)) for seed, s, loss in each)).rows
    assert (row["runs"], row["seeds"]) == (4, 3)
    assert row["s/step"] == pytest.approx(0.25)
    assert (row["loss"], row["eval loss"]) == (0.5, 0.25)


def test_the_interval_holds_the_median_and_takes_three_runs(compared_of):
    (row,) = compared_of(*({"time__step_s": [step_s]} for step_s in (0.10, 0.20))).rows
    assert row["s/step"] == pytest.approx(0.15)
    assert (row["from"], row["to"]) == (None, None)
    compared = compared_of(*({"time__step_s": [step_s]} for step_s in (0.12, 0.13, 0.14, 0.9)))
    (row,) = compared.rows
    assert 0.10 <= row["from"] < row["s/step"] < row["to"] <= 0.9


def test_one_cell_in_two_environments_stands_together_and_the_first_folder_is_a(put, tmp_path):
    put("old", requested__arm="ddp", time__step_s=[0.4])
    put("old", requested__arm="zero1")
    put("new", requested__arm="zero2", software__torch="2.14.0")
    put("new", requested__arm="ddp", software__torch="2.14.0", time__step_s=[0.1])
    compared = compare([tmp_path / "old", tmp_path / "new"])
    cells = [("ddp", "A"), ("ddp", "B"), ("zero1", "A"), ("zero2", "B")]
    assert [(row["arm"], row["environment"]) for row in compared.rows] == cells
    assert [row["vs A"] for row in compared.rows] == [1, pytest.approx(0.25), 1, None]
    turned = compare([tmp_path / "new", tmp_path / "old"])
    assert turned.environments["A"]["torch"] == "2.14.0"
    assert [row["vs A"] for row in turned.rows if row["arm"] == "ddp"] == [1, pytest.approx(4)]


def test_what_is_not_done_is_counted_and_not_averaged(put, tmp_path):
    error = {"kind": "Stop", "message": "no memory", "where": None, "what_to_do": "try again"}
    for status in ("failed", "failed", "oom", "running"):
        put(status=status, error=error, time__step_s=[99.0])
    assert compare([tmp_path]).rows == []
    put()
    compared = compare([tmp_path])
    assert compared.left_out == {"failed": 2, "oom": 1, "running": 1}
    (row,) = compared.rows
    assert (row["runs"], row["s/step"]) == (1, 0.1)
    assert "left out: 2 failed" in notes(compared)


def test_a_run_counts_once_however_often_it_is_met(put, tmp_path, monkeypatch):
    folder = put()
    monkeypatch.chdir(tmp_path)
    for folders in ([".", "runs"], ["runs", tmp_path], [folder, "runs"]):
        assert [row["runs"] for row in compare(folders).rows] == [1], folders
    put()
    shutil.copytree(folder, tmp_path / "archive" / "kept")
    compared = compare([tmp_path / "runs", tmp_path / "runs" / ".." / "runs", folder, tmp_path / "archive"])
    assert [row["runs"] for row in compared.rows] == [2]
    assert compared.left_out == {"copy": 1}


@pytest.mark.parametrize(
    ("per_rank", "components", "peak", "kind"),
    [
        ([None, None], None, None, None),
        ([None, None], [3e6, 5e6], 5.0, "tracked"),
        ([7e6, 6e6], [3e6, 5e6], 7.0, "allocated"),
        ([7e6, None], None, None, None),
    ],
)
def test_the_peak_is_the_largest_ranks_and_says_of_what(compared_of, per_rank, components, peak, kind):
    of_rank = {"per_rank": [{"tracked_peak_bytes": value} for value in components or []]}
    memory = {"per_rank": [{"peak_allocated_bytes": value} for value in per_rank], "components": of_rank}
    (row,) = compared_of({"memory": memory}).rows
    assert (row["peak MB"], row["peak of"]) == (peak, kind)


def test_what_one_run_does_not_know_the_row_does_not_know(compared_of):
    times = [{"step_s": step_s, "setup_s": 1.0} for step_s in ([0.1], [0.2], [])]
    allocated = {"memory__per_rank": [{"peak_allocated_bytes": 9e6}]}
    (row,) = compared_of(*({"time": section, "loss__eval": []} | allocated for section in times), {}).rows
    assert row["runs"] == 4
    assert {row[name] for name in ("s/step", "from", "to", "vs A", "eval loss")} == {None}
    assert (row["peak MB"], row["peak of"]) == (5.0, "tracked"), "the kind of peak that all know"


def test_a_folder_without_runs_is_a_mistake(put, tmp_path):
    put()
    (tmp_path / "empty").mkdir()
    for missing in ("empty", "nowhere"):
        with pytest.raises(Stop, match=f"there is no run below .*{missing}"):
            compare([tmp_path / "runs", tmp_path / missing])
