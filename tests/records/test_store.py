"""The run folder: a record that is written comes back, complete or not at all, and says how its run ended."""

import contextlib
import datetime
import json
import os
import shutil
import subprocess

import pytest

from study.core.errors import Stop
from study.records import store
from study.records.schema import Record
from study.records.sections import CellOfRun
from tests import shaped

FULL = Stop("no room left", "give a larger disk", "oom", "rank 1")


def put(folder, record: Record | None = None) -> Record:
    record = record or store.new("some-run", ["train.py"])
    store.write(folder, record)
    return record


def test_a_number_that_is_not_finite_is_neither_written_nor_read(tmp_path):
    record = shaped.record()
    record.loss.train = [float("nan")]
    with pytest.raises(ValueError, match="Out of range float values"):
        store.write(tmp_path, record)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "record.json").write_text(json.dumps(record.model_dump(by_alias=True)))
    with pytest.raises(Stop, match="NaN is not a number in JSON"):
        store.load(tmp_path)


def test_the_cell_is_that_of_the_sweep(monkeypatch):
    cell = {"protocol": "smoke", "part": "arms", "scale": "tiny", "repeat": 2}
    monkeypatch.setenv(store.CELL, json.dumps(cell))
    assert store.new("run", []).cell == CellOfRun(**cell)
    monkeypatch.setenv(store.CELL, "[1]")  # whatever a user's environment holds
    assert store.new("run", []).cell == CellOfRun()


@pytest.mark.parametrize("text", [None, b'{"schema": 1,\n', b"[" * 100_000, b"\xff\xfe"])
def test_a_record_that_cannot_be_read_is_a_stop_that_names_it(tmp_path, text):
    if text is not None:
        (tmp_path / "record.json").write_bytes(text)
    with pytest.raises(Stop, match=r"record\.json") as caught:
        store.load(tmp_path)
    assert len(caught.value.what) < 400
    assert store.end_badly(tmp_path, FULL, "Stop") is None, "nothing is invented, and no second error hides the first"
    assert [path.read_bytes() for path in tmp_path.iterdir()] == ([] if text is None else [text])


def test_a_link_a_huge_file_and_an_endless_text_are_refused(tmp_path, monkeypatch):
    """Records come from anybody; what a link leads to may be anything of whoever reads them."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/record.json").symlink_to(tmp_path / "record.json")
    put(tmp_path)
    with pytest.raises(Stop, match="symbolic links"):
        store.load(tmp_path / "runs")
    put(tmp_path, store.new("run", []).model_copy(update={"argv": ["x" * 1_000_001]}))
    with pytest.raises(Stop, match=r"argv\.0 must have at most 1000000 characters"):
        store.load(tmp_path)
    monkeypatch.setattr(store, "MAX_BYTES", 10)
    with pytest.raises(Stop, match="has more than 10 bytes"):
        store.load(tmp_path)
    ended = store.ended(store.new("run", []), Stop("x" * 200_000, "shorten it"), "Stop")
    assert len(ended.error.message) == 100_000, "the end of a run is always written"


# --- ends ----------------------------------------------------------------------------------------------------------


def test_the_first_bad_end_stays_whoever_writes_later(tmp_path):
    record = put(tmp_path)
    assert store.end_badly(tmp_path, FULL, "Stop") is True
    ended = store.load(tmp_path)
    assert (ended.status, ended.finished_utc >= record.started_utc) == ("oom", True)
    error = {"kind": "Stop", "message": "no room left", "where": "rank 1", "what_to_do": "give a larger disk"}
    assert ended.error.model_dump() == error
    changed = {"status", "finished_utc", "error"}
    assert ended.model_dump(exclude=changed) == record.model_dump(exclude=changed)
    assert store.end_badly(tmp_path, Stop("another", "remedy"), "ValueError") is False
    record.time.setup_s = 1.0
    store.keep(tmp_path, record)  # by a rank that believes that it is running
    record.time.setup_s = None
    assert store.load(tmp_path) == ended.model_copy(update={"time": ended.time.model_copy(update={"setup_s": 1.0})})


LINES = ['{"step": 1, "loss": 0.5, "lr": 0.1}', '{"step": 1, "eval_loss": 0.7, "accuracy": 0.5}']
LINES += ['{"step": 2, "loss": 0.25, "lr": 0.1}', '{"step": 3, "lo']


def test_of_a_run_that_did_not_end_well_the_losses_are_those_that_it_wrote(tmp_path):
    """Also in the record, once somebody writes its end. The losses of one that is done are its own."""
    put(tmp_path)
    (tmp_path / "steps.jsonl").write_text("\n".join(LINES))
    assert store.load(tmp_path).loss.train == [0.5, 0.25], "it still runs, or nobody was left to write its end"
    store.end_badly(tmp_path, FULL, "Stop")
    written = store.read(tmp_path / "record.json").loss
    assert (written.train, [each.eval_loss for each in written.eval]) == ([0.5, 0.25], [0.7])
    assert put(tmp_path, shaped.record()) == store.load(tmp_path)


@pytest.mark.parametrize("line", ['{"step": 1, "loss": "much"}', '{"step": 1, "loss": 1, "eval_loss": []}', "5", "\0"])
def test_lines_that_are_no_losses_are_unknown_losses(line, tmp_path):
    record = put(tmp_path)
    (tmp_path / "steps.jsonl").write_text(line)
    assert store.load(tmp_path) == record


def test_a_finished_run_stays_done_and_takes_later_results(tmp_path):
    record = put(tmp_path, shaped.record())
    assert store.end_badly(tmp_path, FULL, "Stop") is None
    assert store.load(tmp_path) == record
    later = record.model_copy(update={"finished_utc": store.now_utc()})
    store.keep(tmp_path, later)
    assert store.load(tmp_path) == later


def test_the_record_of_an_earlier_launch_is_not_changed(tmp_path):
    record = put(tmp_path)
    began_s = datetime.datetime.fromisoformat(record.started_utc).timestamp()
    assert store.end_badly(tmp_path, FULL, "Stop", began_s + 1) is None
    assert store.load(tmp_path) == record
    assert store.end_badly(tmp_path, FULL, "Stop", began_s - 1) is True


def test_the_first_rank_that_fails_after_the_training_gives_the_reason(tmp_path):
    record = shaped.record()
    record.observed.instruments_failed = store.UNFINISHED
    put(tmp_path, record)
    for reason in ("no memory", "another rank died"):
        assert store.explain_what_failed(tmp_path, "instruments_failed", reason) == "no memory"
    assert store.load(tmp_path).observed.instruments_failed == "no memory"


def test_the_commit_is_the_source_trees(tmp_path, monkeypatch):
    """Not that of a repository around it, as if it were installed into another checkout."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    monkeypatch.setattr(store, "ROOT", tmp_path / "venv")
    assert store.commit_of_this_tree() == (None, None)
    monkeypatch.setattr(store, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git: dubious ownership
    commit, changed = store.commit_of_this_tree()
    assert (len(commit), changed) == (40, False)
    (tmp_path / "file").touch()
    assert store.commit_of_this_tree() == (commit, True)
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    assert store.commit_of_this_tree() == (None, None), "without git"


@pytest.mark.parametrize("steps", [0, 2])
def test_on_a_full_disk_the_end_stands_in_the_place_of_the_record(steps, small_disk):
    """A record in the place of the old one would need room. The losses stay in steps.jsonl."""
    folder = small_disk / "run"
    folder.mkdir()
    record = put(folder)
    (folder / "steps.jsonl").write_text("\n".join(LINES[:steps]))
    with (small_disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    stop = Stop("the disk is full", "make room")
    assert store.end_badly(folder, stop, "OSError") is True
    ended = store.load(folder)
    assert (ended.status, ended.error.message, ended.error.what_to_do) == ("failed", "the disk is full", "make room")
    assert ended.run_id == record.run_id
    assert ended.loss.train == [0.5][: steps // 2]
    assert store.end_badly(folder, Stop("x" * 100_000, "make room"), "OSError") is False
    assert sorted(path.name for path in folder.iterdir()) == ["record.json", "steps.jsonl"]


def test_a_reason_that_does_not_fit_on_a_full_disk_leaves_the_record(small_disk):
    record = put(small_disk)
    with (small_disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert store.end_badly(small_disk, Stop("x" * 100_000, "make room"), "OSError") is None
    assert store.load(small_disk) == record


def test_a_run_whose_folder_is_gone_is_said(tmp_path):
    record = put(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()  # by a heartbeat
    for write in (
        lambda: store.keep(tmp_path / "run", record),
        lambda: store.append_step(tmp_path / "run", {"step": 1}),
    ):
        with pytest.raises(Stop, match="was removed, or its record"):
            write()
    assert list((tmp_path / "run").iterdir()) == []
