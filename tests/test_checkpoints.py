"""A run that was killed and goes on is the run that was never killed: losses, rates, order, dropout and weights."""

import pytest
from conftest import RANKS, launch

from study.spec.arms import NAMES

FLAGS = ("--steps", "9", "--warmup-steps", "2", "--sequence", "32", "--micro-batch", "4", "--train-rows", "32")
FLAGS = (
    *FLAGS,
    "--eval-rows",
    "16",
    "--epochs",
    "9",
    "--no-instruments",
    "--checkpoint-every",
    "3",
    "--eval-every",
    "3",
)
QUICK = ("ddp", "zero2", "fsdp2")
CURVE = ("train", "eval", "final_train", "final_eval")


@pytest.fixture
def killed(tmp_path, cache, monkeypatch):
    """A function that trains an arm until one of its ranks kills itself, and one that goes on with what it left."""

    def kill(arm: str, *flags: str, at: str = "0:8", ranks: int | None = None):
        monkeypatch.setenv("DIES_AT", at)
        ranks = ranks or RANKS.get(arm, 2)
        launcher = ("--num_processes", str(ranks)) if ranks > 2 else ()
        run = launch(arm, tmp_path / f"killed-{arm}", *flags, cache=cache, launcher=launcher, script="tests/dying.py")
        assert run.code != 0
        assert run.record["status"] != "done"
        return run

    return kill


def resumed(run, arm: str, folder, cache, *flags: str, ranks: int | None = None):
    ranks = ranks or RANKS.get(arm, 2)
    launcher = ("--num_processes", str(ranks)) if ranks > 2 else ()
    return launch(arm, folder, *flags, "--resume", str(run.folder), cache=cache, launcher=launcher)


def assert_equal(again: dict, whole: dict) -> None:
    """Bit for bit."""
    for name in CURVE:
        assert again["loss"][name] == whole["loss"][name], name
    for name in ("learning_rates", "final_weights_checksum", "data_checksum", "loss_scale"):
        assert again["observed"][name] == whole["observed"][name], name


@pytest.mark.parametrize("arm", [*QUICK, *(pytest.param(a, marks=pytest.mark.slow) for a in NAMES if a not in QUICK)])
def test_killed_and_resumed_is_never_killed(arm, killed, trained, tmp_path, cache):
    whole = trained(arm, *FLAGS).record
    run = killed(arm, *FLAGS)
    again = resumed(run, arm, tmp_path / "again", cache, *FLAGS)
    assert again.code == 0, again.output
    assert len(set(whole["loss"]["train"])) == 9, "a curve on which a step too many would show"
    assert_equal(again.record, whole)
    resume = again.record["checkpoints"]["resumes"][0]
    assert (resume["step"], resume["reached"], resume["random_states"]) == (6, 6, True)
    assert [line["step"] for line in again.steps if "loss" in line] == list(range(1, 10))
    assert len(again.record["time"]["step_s"]) == 1, "of three steps after a resume two are warm-up"
