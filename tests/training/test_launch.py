"""The launcher itself: a forked launch, which the other tests use, is the same training as a real one."""

from conftest import STEPS, TRAINED, launch, left_running


def test_a_forked_launch_trains_what_a_real_one_does(trained, tmp_path, cache):
    trained("ddp", *TRAINED)  # draws the weights, unless another test did: a rank that draws them keeps 16 bytes more
    real, forked = launch("zero3", tmp_path / "real", *TRAINED, cache=cache, real=True), trained("zero3", *TRAINED)
    assert real.code == 0, real.output
    assert left_running(real.folder) == []
    ours, theirs = forked.record, real.record
    assert ours["status"] == theirs["status"] == "done"
    assert ours["requested"].pop("run_dir") != theirs["requested"].pop("run_dir")
    for section in ("requested", "observed", "loss"):
        assert ours[section] == theirs[section]
    assert len(ours["loss"]["train"]) == STEPS
    assert ours["traffic"]["per_rank"] == theirs["traffic"]["per_rank"]
    assert ours["memory"]["components"] == theirs["memory"]["components"]
