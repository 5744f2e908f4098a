"""The launcher itself: a forked launch, which the other tests use, is the same training as a real one."""

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import PartialState
from accelerate.utils.launch import prepare_multi_gpu_env

from study.core.arms import FOLDER
from tests import conftest
from tests.conftest import STEPS, TRAINED, launch, left_running
from tests.training.test_gpu import backend_on_a_gpu


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


# --- what these tests do on a GPU, as far as a CPU can tell --------------------------------------------------------


@pytest.mark.parametrize(("gpus", "told"), [(0, "cpu"), (1, None)])
def test_only_without_a_gpu_deepspeed_is_told_to_take_the_cpu(gpus, told, monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(conftest, "num_gpus", lambda: gpus)
    assert conftest.environment_of_the_server().get("DS_ACCELERATOR") == told
    assert "DS_ACCELERATOR" not in (conftest.ROOT / "tests" / "forkserver.py").read_text()


class Begun(Exception):
    """Instead of a group of ranks."""


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fsdp2_grad_op", "fsdp2_cpu"])
def test_the_backend_that_is_expected_on_a_gpu_is_the_one_that_accelerate_opens(name, monkeypatch):
    """Its own code decides, by what its launcher makes of the arm's file."""

    def begin(backend: str, **_) -> None:
        raise Begun(backend)

    args, *_ = _validate_launch_command(
        launch_command_parser().parse_args(
            ["--config_file", str(FOLDER / f"{name}.yaml"), "--num_processes", "1", "study/train.py"]
        )
    )
    for variable, value in prepare_multi_gpu_env(args).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(PartialState, "_shared_state", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "init_process_group", begin)
    with pytest.raises(Begun) as begun:
        PartialState()
    assert str(begun.value) == backend_on_a_gpu(name)
