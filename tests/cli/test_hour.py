"""The hour of a machine, rehearsed: killed, on a full disk, with a bucket that refuses; and it goes on where it was."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

from study.cli import hour as module
from study.cli import preparing
from study.cli.hour import HourFlags, hour
from study.core import machine
from study.core.errors import Stop
from study.records import store
from study.sweeps import archive, launches, outcomes, protocol
from tests.conftest import ROOT

MINI = """about = "four cells"
document = "none"
replicates = "nothing"
[[part]]
name = "mini"
arm = ["ddp", "zero2"]
ranks = 2
task = "wikitext"
model = "gpt-tiny"
data = "embedded"
init = "random"
sequence = 64
steps = 6
eval_rows = 8
[part.tiny]
[[part]]
name = "capped"
arm = "single"
ranks = 1
task = "wikitext"
model = "gpt-tiny"
data = "embedded"
init = "random"
sequence = 64
steps = 6
eval_rows = 8
[part.tiny]
memory_cap_gib = [0.03, 1.0]
"""
CUDA_ALONE = ("zero3_qgz", "zero3_qwz")


@pytest.fixture
def mini(tmp_path, monkeypatch) -> Path:
    """A protocol of four cells, the third of which is out of memory. Checks that take long are left out."""
    for name in ("answer", "calibrate"):
        monkeypatch.setattr(preparing, name, lambda *_: None)
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # the hour changes what they do
        monkeypatch.setattr(signal, name, getattr(signal, name))
    monkeypatch.delenv(archive.UPLOAD, raising=False)
    path = tmp_path / "mini.toml"
    path.write_text(MINI)
    return path


@pytest.fixture
def cells_run(monkeypatch, forked_cells) -> list[str]:
    """The arms of cells that were launched, in order. A cell under a small cap ends as it would."""
    ran, run = [], launches.run

    def launched(cell, folder, *others):
        ran.append(cell.arm)
        if cell.settings.get("memory_cap_gib") == 0.03:
            folder.mkdir()
            record = cell.new_record(folder).model_copy(update={"software": machine.versions()})
            return outcomes.write_end(folder, record, Stop("no memory", "give more", "oom", "rank 0"))
        return run(cell, folder, *others)

    monkeypatch.setattr(launches, "run", launched)
    return ran


def spent(*words, **options) -> int:
    """Spend an hour in this process, and return its exit code."""
    with pytest.raises(SystemExit) as end:
        hour(*map(str, words), place=HourFlags(**options))
    return end.value.code


def names(path: Path) -> list[str]:
    with tarfile.open(path) as file:
        return sorted(file.getnames())


def statuses(runs: Path) -> list[str]:
    folders = sorted(store.run_folders(runs), key=lambda folder: store.load(folder).started_utc)
    return [store.load(folder).status for folder in folders]


SOME = ("gpt2-xl-one-pass", "older-release", "offload-capped", "bytes-of-zero-pp")


@pytest.mark.parametrize("parts", [SOME, pytest.param((), marks=pytest.mark.slow)], ids=["some", "all"])
def test_the_hour_is_rehearsed_and_has_a_page(parts, tmp_path, monkeypatch, forked_cells, capsys):
    """The first cells of some parts, or all cells, on two ranks: each is a row, and what needs a GPU says so."""
    for name in ("answer", "calibrate"):
        monkeypatch.setattr(preparing, name, lambda *_: None)
    cells = protocol.cells(protocol.read("eight"), "tiny")
    if parts:
        cells = [next(cell for cell in cells if cell.part == part) for part in parts]
    monkeypatch.setattr(protocol, "cells", lambda *_: cells)
    # The release that is installed stands for the older one, which comes from an index.
    monkeypatch.setattr(launches, "get_release", lambda release: None)
    runs, away = tmp_path / "eight", tmp_path / "away"
    monkeypatch.setenv("STUDY_NAME", "somebody")
    assert spent(runs=runs, upload=str(away)) == 1, "some need a GPU"
    records = {folder.name.rpartition("-r")[0]: store.load(folder) for folder in store.run_folders(runs)}
    assert {*records} == {cell.name for cell in cells}
    wrong = {name for name, record in records.items() if record.status != "done"}
    assert wrong == {cell.name for cell in cells if cell.arm in CUDA_ALONE}
    kept = names(away / archive.NAME)
    assert len([name for name in kept if name.endswith(store.RECORD)]) == len(cells)
    assert "README.md" in kept
    page = (runs / "page" / "contributed.html").read_text()
    assert "gpt2-xl-one-pass" in page
    with tarfile.open(away / archive.NAME) as file:
        assert "| entity | somebody |" in file.extractfile("README.md").read().decode()
    # --- again: nothing is run that is done. The older release's record gets its name, as its launch would have it
    for older in runs.glob("older-release-*"):
        record = store.load(older)
        store.write(older, record.model_copy(update={"software": record.software | {"deepspeed": "0.18.5"}}))
    capsys.readouterr()
    monkeypatch.setattr(launches, "run", lambda *_: pytest.fail("it is run again"))
    spent(runs=runs, upload=str(away))
    said = capsys.readouterr().out
    assert sum(map(int, re.findall(r"(\d+) cells? done before", said))) == len(cells) - len(wrong), said


def test_a_killed_hour_goes_on_on_another_machine(tmp_path, mini, cells_run, monkeypatch):
    """It is ended while its second cell trains. What was done is in the archive, and is not done again."""
    away, run = tmp_path / "away", launches.run

    def ended(cell, folder, *others):
        if cell.arm == "zero2":
            folder.mkdir()
            outcomes.write_end(folder, cell.new_record(folder), launches.INTERRUPTED)
            raise KeyboardInterrupt
        return run(cell, folder, *others)

    monkeypatch.setattr(launches, "run", ended)
    assert spent(mini, runs=tmp_path / "first", upload=str(away)) == 130
    assert len([name for name in names(away / archive.NAME) if name.endswith(store.RECORD)]) == 2
    monkeypatch.setattr(launches, "run", run)
    cells_run.clear()
    there = tmp_path / "second"
    assert spent(mini, runs=there, upload=str(away)) == 0
    assert cells_run == ["zero2", "single", "single"]
    assert statuses(there) == ["done", "killed", "done", "oom", "done"]
    assert spent(mini, runs=there, upload=str(away)) == 0
    assert len(cells_run) == 3, "nothing is left, and out of memory is an answer"


def test_a_rank_that_dies_is_a_row_and_is_tried_again(tmp_path, mini, cells_run, monkeypatch):
    run = launches.run

    def dies(cell, folder, *others):
        if cell.arm != "ddp":
            return run(cell, folder, *others)
        folder.mkdir()
        return outcomes.write_end(folder, cell.new_record(folder), Stop("rank 1 was killed (SIGKILL)", "start again"))

    monkeypatch.setattr(launches, "run", dies)
    runs = tmp_path / "runs"
    assert spent(mini, runs=runs) == 1
    assert statuses(runs) == ["failed", "done", "oom", "done"]
    monkeypatch.setattr(launches, "run", run)
    assert spent(mini, runs=runs) == 0
    assert statuses(runs)[-1] == "done"


def test_a_bucket_that_refuses_ends_nothing(tmp_path, mini, cells_run, monkeypatch, capsys):
    """It refuses the first two archives. The third has all records of before."""
    monkeypatch.chdir(tmp_path)
    opened, refusals = fsspec.open, [PermissionError("no, hf_" + "a" * 20)] * 2

    def refusing(path, mode):
        if mode == "wb" and refusals:
            raise refusals.pop()
        return opened(path, mode)

    monkeypatch.setattr(fsspec, "open", refusing)
    assert spent(mini, runs=tmp_path / "runs", upload="memory://hour/mine") == 0
    said = capsys.readouterr().out
    assert said.count("the archive did not reach memory://hour/mine (no, (secret)); it is tried again") == 2
    (tmp_path / "bucket.tar.gz").write_bytes(fsspec.filesystem("memory").cat(f"/hour/mine/{archive.NAME}"))
    assert names(tmp_path / "bucket.tar.gz") == names(tmp_path / "runs" / archive.NAME)
    assert archive.bring_back(tmp_path / "other", "memory://hour/mine") == 4


def test_a_bucket_that_refuses_at_the_start_or_needs_a_package_is_one_sentence(tmp_path, monkeypatch):
    def refuses(*_):
        raise PermissionError("not yours")

    monkeypatch.setattr(fsspec, "open", refuses)
    with pytest.raises(Stop, match="not yours"):
        archive.bring_back(tmp_path, "memory://hour")
    monkeypatch.undo()
    with pytest.raises(Stop, match=r"s3:// cannot be used .*s3fs") as stop:
        archive.bring_back(tmp_path, "s3://hour")
    assert "pip install fsspec s3fs" in stop.value.sentence
    with pytest.raises(Stop, match="nosuch:// cannot be used"):
        archive.bring_back(tmp_path, "nosuch://hour")


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b\x08half of one"])
def test_a_damaged_archive_is_one_sentence(tmp_path, content):
    (tmp_path / archive.NAME).write_bytes(content)
    with pytest.raises(Stop, match=r"records\.tar\.gz in .* is damaged"):
        archive.bring_back(tmp_path / "runs", str(tmp_path))


def test_an_archive_writes_nothing_but_records_below_the_folder(tmp_path):
    names = (
        "../up.json",
        "runs/../record.json",
        "runs/../../a/record.json",
        "runs/a/log.txt",
        "/abs/record.json",
        "runs/good/record.json",
    )
    with tarfile.open(tmp_path / archive.NAME, "w:gz") as file:
        for name in names:
            file.addfile(tarfile.TarInfo(name), io.BytesIO())
    runs = tmp_path / "in" / "runs"
    with pytest.raises(Stop, match="cannot be the name"):
        archive.bring_back(runs, str(tmp_path))
    assert [path for path in tmp_path.rglob("*.json") if not path.is_relative_to(runs)] == []


def test_an_upload_that_never_answers_holds_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "UPLOAD_S", 0.2)
    monkeypatch.setattr(fsspec, "open", lambda *_: time.sleep(5))
    (problem,) = archive.keep(tmp_path, "memory://hour", {})
    assert "no answer within 0.2 s" in problem


def test_a_full_disk_stops_in_a_sentence_and_the_archive_is_elsewhere(
    small_disk, tmp_path, mini, cells_run, monkeypatch
):
    """The records of before are elsewhere, and the next start, with room, goes on."""
    away, runs, run = tmp_path / "away", small_disk / "runs", launches.run
    filler = small_disk / "filler"

    def fills(cell, folder, *others):
        if filler.exists():  # a launch on the full disk leaves nothing
            folder.mkdir()
            return outcomes.write_end(folder, cell.new_record(folder), Stop("it had no room", "make room"))
        record = run(cell, folder, *others)
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(2**16)):
                pass
        return record

    monkeypatch.setattr(launches, "run", fills)
    with pytest.raises(Stop, match=r"cannot write to .* \(No space left"):
        hour(str(mini), place=HourFlags(runs=runs, upload=str(away)))
    monkeypatch.setattr(launches, "run", run)
    assert len([name for name in names(away / archive.NAME) if name.endswith(store.RECORD)]) == 1
    filler.unlink()
    cells_run.clear()
    assert spent(mini, runs=runs, upload=str(away)) == 0
    assert cells_run == ["zero2", "single", "single"]


def test_cells_take_packed_data_and_other_cells_do_not_change():
    """Without a network real data comes from what was packed, and nothing else changes."""
    cells = protocol.cells(protocol.read("eight"), "one_gpu")
    packed = [module.packed(cell, ROOT / "gpu-pack") for cell in cells]
    folders = {"data": "gpu-pack/data/wikitext-2", "tokenizer": "gpu-pack/models/gpt2"}
    changed = [replace(cell, settings=cell.settings | folders) for cell in cells if cell.settings["data"] == "hub"]
    assert changed
    assert [cell for cell in packed if cell not in cells] == changed


def test_another_release_stands_before_the_installed_one_and_makes_another_cell(monkeypatch, tmp_path):
    (cell,) = [each for each in protocol.cells(protocol.read("eight"), "tiny") if each.deepspeed]
    assert replace(cell, deepspeed=None).name != cell.name
    monkeypatch.setenv("ZERO_STUDY_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "mine")
    variables = launches.of_release(cell.deepspeed)
    assert variables == {"PYTHONPATH": f"{launches.release_folder(cell.deepspeed)}{os.pathsep}mine"}
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(Stop, match=r"deepspeed 0\.18\.5 cannot be installed"):
        launches.get_release("0.18.5")
    assert not launches.release_folder("0.18.5").exists()


@pytest.mark.slow
def test_cells_for_one_gpu_run_side_by_side_and_end_with_the_hour(tmp_path, mini, monkeypatch):
    """Two processes, as on two cards, each with its part. SIGTERM to the hour ends both and their launches."""
    runs = tmp_path / "runs"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "study.cli", "hour", str(mini), "--scale", "tiny", "--runs", str(runs)]
    lanes = [subprocess.Popen([*words, "--lane", str(n), "2"], env=environment, cwd=ROOT) for n in (1, 2)]
    assert [lane.wait(300) for lane in lanes] == [0, 0]
    assert sorted(statuses(runs)) == ["done", "oom"]
    whole = subprocess.Popen(words, env=environment, cwd=ROOT)
    while len(store.run_folders(runs)) < 3:
        time.sleep(0.5)
    whole.send_signal(signal.SIGTERM)
    assert whole.wait(60) == 130
    assert "killed" in statuses(runs)
    assert (runs / archive.NAME).exists()


def test_a_script_that_takes_too_long_keeps_the_line_that_it_had(tmp_path):
    lines = "import time; print('{\"first\": 1}', flush=True); time.sleep(60)"
    preparing.answer(tmp_path, "late", ["-c", lines], 5)
    preparing.answer(tmp_path, "failed", ["-c", "raise SystemExit(3)"], 5)
    assert (tmp_path / "late.json").read_text() == '{"first": 1}'
    assert not (tmp_path / "failed.json").exists()
