"""What is made of interrupted runs: the sweep's choice of a try to go on from, their times, and the report's tables."""

import pytest
from shaped import failed, finished, put

from study.core import machine
from study.records import checkpoints, metrics
from study.records.schema import Record
from study.sweeps import launches, sweep
from study.sweeps.launches import Turn
from study.sweeps.protocol import Cell

RESUME = {"run_id": "killed", "step": 6, "reached": 8, "arm": "zero2", "ranks": 2}
SAVED = {
    "step": 6,
    "bytes": 16_000_000,
    "written_bytes_per_rank": [10, 6],
    "save_s_per_rank": [0.1, 0.3],
    "seal_s": 0.2,
}


def turn(**settings) -> Turn:
    return Turn(Cell("mine", "p", "tiny", "zero2", 2, {"task": "imdb"} | settings), 1)


def attempt(runs, turn: Turn, number: int, status: str, *steps: int):
    """A try of a turn that ended with this status and left checkpoints."""
    folder = runs / f"{turn.name}.{number}"
    record = failed(folder.name, arm="zero2") | {"status": status, "software": machine.versions()}
    put(runs, record)
    for step in steps:
        part = checkpoints.part_of(folder, step)
        part.mkdir(parents=True)
        (part / "weights").write_bytes(b"w")
        checkpoints.seal(part)
    return folder


def test_the_sweep_goes_on_from_the_newest_try_with_a_good_checkpoint(tmp_path):
    mine = turn(checkpoint_every=3)
    attempt(tmp_path, mine, 1, "failed", 3)
    second = attempt(tmp_path, mine, 2, "killed", 3, 6)
    attempt(tmp_path, mine, 3, "failed")
    assert sweep.to_resume(tmp_path, mine) == second
    (second / "checkpoints" / "step-00000006" / "weights").write_bytes(b"x")
    assert sweep.to_resume(tmp_path, mine) == second, "the one before is good"
    (second / "checkpoints" / "step-00000003" / "weights").unlink()
    assert sweep.to_resume(tmp_path, mine).name.endswith(".1")


@pytest.mark.parametrize("status", ["oom", "diverged", "done"])
def test_what_would_end_alike_is_not_resumed_nor_what_has_no_checkpoints(status, tmp_path):
    mine = turn(checkpoint_every=3)
    attempt(tmp_path, mine, 1, status, 3)
    assert sweep.to_resume(tmp_path, mine) is None
    attempt(tmp_path, turn(), 2, "failed", 3)
    assert sweep.to_resume(tmp_path, turn()) is None


def test_the_launch_names_the_try(tmp_path):
    mine = turn(checkpoint_every=3).cell
    assert launches.command(mine, tmp_path, None, tmp_path / "before")[-2:] == ["--resume", str(tmp_path / "before")]
    assert "--resume" not in launches.command(mine, tmp_path, None)


@pytest.mark.parametrize("path", ["step_s", "energy.joules_per_rank.0"])
def test_times_of_a_resumed_run_are_not_known(path):
    record = Record.model_validate(finished(energy__joules_per_rank=[1.0, 1.0]))
    assert metrics.value(record, path) > 0
    record.checkpoints.resumes = [RESUME]
    assert metrics.value(record, path) is None
    assert metrics.value(record, "train_loss") == record.loss.train[-1]
