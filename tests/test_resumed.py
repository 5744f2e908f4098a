"""What is made of interrupted runs: the sweep's choice of a try to go on from, their times, and the report's tables."""

import pytest
from shaped import failed, finished, put, rows

from study.machine import software
from study.records import checkpoints, metrics
from study.records.runs import load
from study.records.schema import Record
from study.report.topics import checkpoints as kept
from study.sweeps import launches, sweep
from study.sweeps.launches import Turn
from study.sweeps.protocol import Cell

RESUME = {"run_id": "killed", "step": 6, "reached": 8, "arm": "zero2", "ranks": 2, "route": "load_state"}
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
    record = failed(folder.name, arm="zero2") | {"status": status, "software": software.versions()}
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
    second = attempt(tmp_path, mine, 2, "interrupted", 3, 6)
    attempt(tmp_path, mine, 3, "failed")
    assert sweep.to_resume(tmp_path, mine) == second
    (second / "checkpoints" / "step-00000006" / "weights").write_bytes(b"x")
    assert sweep.to_resume(tmp_path, mine) == second, "the one before is good"
    (second / "checkpoints" / "step-00000003" / "weights").unlink()
    assert sweep.to_resume(tmp_path, mine).name.endswith(".1")


@pytest.mark.parametrize("status", ["oom", "diverged", "unavailable", "done"])
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


@pytest.fixture
def runs(tmp_path):
    """A run that was never killed, one that was, two moves of which one is refused, and their source."""

    def of(part: str, name: str, ranks: int = 2, **changes) -> dict:
        record = finished(name, "zero2", ranks) | {"cell": {"protocol": "resume", "part": part}} | changes
        record["observed"]["learning_rates"] = [1e-3] * record["observed"]["steps"]
        return record

    whole = of("whole", "whole", checkpoints={"saved": [SAVED]})
    resume = RESUME | {"load_s_per_rank": [0.5, 0.4]}
    killed = of("killed", "killed-2", loss=whole["loss"], checkpoints={"saved": [SAVED], "resumes": [resume]})
    source = of("source", "source-zero2-2", checkpoints={"saved": [SAVED | {"bytes": 1}]})
    off = {"train": [*source["loss"]["train"][:-1], source["loss"]["train"][-1] * 1.5]}
    loaded = of("moved_universal", "universal-zero2-2-to-zero2-4", loss=source["loss"] | off)
    loaded["checkpoints"] = {"resumes": [resume | {"run_id": "source-zero2-2", "route": "universal"}]}
    refused = failed("moved-zero2-2-to-zero2-4", arm="zero2") | {"cell": {"protocol": "resume", "part": "moved"}}
    on_four = of("source", "source-zero2-4", 4, checkpoints={"saved": [SAVED]})
    put(tmp_path, whole, killed, source, on_four, loaded, refused)
    return load([tmp_path])


def test_costs(runs):
    on_four, row = sorted(rows(kept.table(runs)), key=lambda row: -row["ranks"])  # of two ranks, from the part `whole`
    assert (on_four["ranks"], on_four["load_s"]) == (4, None), "only the checkpoint of two ranks was loaded"
    assert row["bytes_per_parameter"] == pytest.approx(16e6 / runs.runs[0].parameters)
    assert (row["share_of_one_rank"], row["save_s"], row["load_s"]) == (10 / 16, 0.3, 0.5)
    assert row["predicted_bytes_per_parameter"] == 14, "the made-up runs have bf16 weights"


def test_equality(runs):
    (row,) = kept.equality(runs).to_dict("records")
    assert (row["interruptions"], row["killed_at_step"], row["went_on_after_step"]) == (1, 8, 6)
    assert row["losses_differ_by"] == row["rates_differ_by"] == 0


def test_what_went_on(runs):
    text = kept.sentence_of_resumed(kept.equality(runs), kept.moves(runs))
    assert text == "**1 of 2 resumed runs have the same losses, bit for bit**; the largest difference is 5e-01."


def test_moves(runs):
    refused, loaded = kept.moves(runs).to_dict("records")
    expected = ["zero2-2", "zero2-4", "loaded directly", False]
    assert [refused[name] for name in ("from", "to", "route", "loads")] == expected
    assert refused["message"]
    assert (loaded["route"], loaded["loads"]) == ("universal checkpoint", True)
    assert loaded["losses_differ_by"] == pytest.approx(0.5)


def test_curves_of_different_lengths_are_not_compared():
    assert kept.furthest([1.0, 2.0], [1.0]) is None
    assert kept.furthest([1.0, 3.0], [1.0, 2.0]) == 0.5
