"""The launcher itself: a forked launch, which the other tests use, is the same training as a real one."""

import pytest
from conftest import launch, left_running

STEPS = 6
FLAGS = ("--steps", str(STEPS), "--train-rows", "96", "--eval-rows", "16", "--sequence", "32")


@pytest.mark.parametrize(
    "arm", [*(pytest.param(arm, marks=pytest.mark.slow) for arm in ("single", "ddp", "zero3_cpu")), "zero3"]
)
def test_a_forked_launch_trains_what_a_real_one_does(arm, tmp_path, cache):
    real = launch(arm, tmp_path / "real", *FLAGS, cache=cache, real=True)
    forked = launch(arm, tmp_path / "forked", *FLAGS, cache=cache)
    assert (real.code, forked.code) == (0, 0), real.output + forked.output
    assert left_running(real.folder) == []
    ours, theirs = forked.record, real.record
    assert ours["status"] == theirs["status"] == "done"
    assert ours["requested"].pop("run_dir") != theirs["requested"].pop("run_dir")
    assert ours["requested"] == theirs["requested"]
    assert ours["observed"] == theirs["observed"]
    assert ours["loss"] == theirs["loss"]
    assert len(ours["loss"]["train"]) == STEPS
    assert ours["traffic"]["per_rank"] == theirs["traffic"]["per_rank"]
    for record in (ours, theirs):
        for rank in record["memory"]["components"]["per_rank"]:
            assert rank.pop("tracked_mean_bytes") > 0  # a mean over time: it differs from launch to launch
    assert ours["memory"]["components"] == theirs["memory"]["components"]
