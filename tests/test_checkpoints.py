"""A run that was killed and goes on is the run that was never killed: losses, rates, order, dropout and weights."""

import hashlib
import types
from pathlib import Path

import pytest
import torch
from conftest import DECODERS_ALONE, RANKS, Launched, launch, traceback_of_ours
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from study.core.arms import NAMES, all_paths, read
from study.core.errors import Stop
from study.core.settings import Flags, resolve
from study.core.shapes import VOCABULARY
from study.records import checkpoints
from study.training import checkpoints as resuming
from study.training import models

FLAGS = "--steps 9 --warmup-steps 2 --sequence 32 --micro-batch 4 --train-rows 32 --eval-rows 16 --epochs 9"
FLAGS = (*FLAGS.split(), "--no-instruments", "--checkpoint-every", "3", "--eval-every", "3")
QUICK = ("zero2", "fsdp2")
CURVE = ("train", "eval")
HAPPENINGS = ("DIES_AT", "FULL_AT", "GROWS")


@pytest.fixture
def train(tmp_path, cache, monkeypatch):
    """A function that trains with what is to happen to the run, in a folder of this name."""

    def train(
        arm: str, name: str, *flags: str, ranks: int | None = None, resume: Launched | None = None, **happens: str
    ):
        for each in HAPPENINGS:
            monkeypatch.delenv(each, raising=False)
        for each, value in happens.items():
            monkeypatch.setenv(each, value)
        ranks = ranks or RANKS.get(arm, 2)
        launcher = ("--num_processes", str(ranks)) if ranks > 2 else ()
        words = ("--resume", str(resume.folder)) if resume else ()
        script = "tests/dying.py" if happens else "study/train.py"
        return launch(arm, tmp_path / name, *flags, *words, cache=cache, launcher=launcher, script=script)

    return train


def resume_of(run: Launched) -> dict:
    return run.record["checkpoints"]["resumes"][-1]


def checkpoints_of(run: Launched) -> list[str]:
    return sorted(path.name for path in (run.folder / "checkpoints").iterdir())


def assert_equal(again: Launched, whole: Launched) -> None:
    """Bit for bit."""
    assert again.code == 0, again.output
    losses = whole.record["loss"]["train"]
    assert len(set(losses)) == len(losses), "a curve on which a step too many would show"
    for name in CURVE:
        assert again.record["loss"][name] == whole.record["loss"][name], name
    for name in ("learning_rates", "final_weights_checksum", "data_checksum", "loss_scale"):
        assert again.record["observed"][name] == whole.record["observed"][name], name


# What is divided by layers or sequences: two ranks share a row.
DECODER = ("--task", "wikitext", "--model", "llama-micro")
OTHERS = [arm for arm in NAMES if arm not in (*QUICK, "zero3_nvme")]


@pytest.mark.parametrize("arm", [*QUICK, *(pytest.param(arm, marks=pytest.mark.slow) for arm in OTHERS)])
def test_killed_and_resumed_is_never_killed(arm, train, trained):
    flags = (*FLAGS, *DECODER) if arm in DECODERS_ALONE else FLAGS
    whole = trained(arm, *flags)
    before = whole  # a run that ended well leaves the same checkpoints: only one arm needs to be killed
    if arm == "zero2":
        before = train(arm, "killed", *flags, DIES_AT="0:8")
        assert before.code != 0
        assert before.record["status"] != "done"
    again = train(arm, "again", *flags, resume=before)
    assert_equal(again, whole)
    resume = resume_of(again)
    reached = 6 if arm == "zero2" else 9
    assert (resume["step"], resume["reached"], resume["random_states"], resume["passed_over"]) == (6, reached, True, [])
    assert [line["step"] for line in again.steps if "loss" in line] == list(range(1, 10))
    assert len(again.record["time"]["step_s"]) == 1, "of three steps after a resume two are warm-up"
    assert checkpoints_of(whole) == ["step-00000003", "step-00000006"]


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["zero2", "zero3"])
def test_the_loss_scale_goes_on(arm, train):
    """DeepSpeed's checkpoints do not have it. Here it grows every four steps, and is no more what it was at first."""
    flags = (*FLAGS, "--precision", "fp16")
    whole = train(arm, "whole", *flags, GROWS="4")
    killed = train(arm, "killed", *flags, GROWS="4", DIES_AT="1:8")
    again = train(arm, "again", *flags, resume=killed, GROWS="4")
    assert whole.record["observed"]["loss_scale"] != 65536
    assert_equal(again, whole)


def test_a_full_disk_ends_the_run_and_spoils_no_checkpoint(train):
    full = train("zero2", "full", *FLAGS, FULL_AT="2")
    assert full.code != 0
    assert full.record["error"]["message"].startswith("the checkpoint of step 6 could not be written")
    assert not traceback_of_ours(full.output)
    assert checkpoints.last_good(full.folder)[0].name == "step-00000003"


def test_what_is_no_checkpoint_of_this_training_is_refused(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(resuming, "broadcast_object_list", lambda values: values)
    folder = trained("zero2", *FLAGS).folder
    progress = checkpoints.read_progress(checkpoints.last_good(folder)[0])
    accelerator = types.SimpleNamespace(is_main_process=True, num_processes=2)

    def resume(arm: str, folder: Path, **changed):
        settings = types.SimpleNamespace(**progress.requested.model_dump() | changed | {"resume": folder})
        data = types.SimpleNamespace(checksum=progress.data_checksum)
        rows = progress.rows_per_step
        values = {"arm": read(all_paths()[arm]), "accelerator": accelerator, "data": data, "steps": progress.steps}
        return resuming.find(types.SimpleNamespace(settings=settings, rows_taken_per_step=rows, **values))

    assert resume("zero2", folder).progress.step == 6
    with pytest.raises(Stop, match=r"another training \(--lr was 0.001 and is 0.5; --seed was 42 and is 7\)"):
        resume("zero2", folder, lr=0.5, seed=7)
    with pytest.raises(Stop, match=r"has no good checkpoint \(there is none\)"):
        resume("zero2", tmp_path)
    with pytest.raises(Stop, match="does not restore optimizer states"):
        resume("zero3_nvme", folder)


def weights_in(checkpoint: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """The whole weights of a checkpoint, by what the libraries have for that."""
    if (checkpoint / "pytorch_model").is_dir():
        return dict(get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), tag="pytorch_model"))
    dcp_to_torch_save(checkpoint / "pytorch_model_fsdp_0", scratch / "whole.pt")
    return torch.load(scratch / "whole.pt")["model"]


@pytest.mark.parametrize("arm", ["zero2", "fsdp2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_its_weights_come_out_whole(arm, trained, tmp_path):
    """`zero_to_fp32` and `dcp_to_torch_save` give the weights that training had, bit for bit, without their arm."""
    run = trained(arm, *FLAGS)
    checkpoint, _ = checkpoints.last_good(run.folder)
    weights, digest = weights_in(checkpoint, tmp_path), hashlib.sha256()
    settings = resolve(Flags(), gpu=False)
    for name, _ in models.on_meta(settings, models.model_config(settings, VOCABULARY)).named_parameters():
        digest.update(name.encode())
        digest.update(weights[name].contiguous().flatten().view(torch.uint8).numpy())
    assert digest.hexdigest()[:16] == checkpoints.read_progress(checkpoint).weights_checksum
    assert digest.hexdigest()[:16] != run.record["observed"]["weights_checksum"], "they are no more what they were"


def test_its_memory_and_its_bytes_are_not_the_steps(trained):
    """A checkpoint's costs are in the record, apart from the timed steps."""
    record = trained("zero2", *FLAGS).record
    first, last = record["checkpoints"]["saved"]
    parameters = record["observed"]["parameters"]
    assert (first["step"], last["step"]) == (3, 6)
    assert first["bytes"] == pytest.approx(16 * parameters, rel=0.05)
    assert sum(first["written_bytes_per_rank"]) == pytest.approx(first["bytes"], rel=0.05)
    assert len(first["save_s_per_rank"]) == len(first["peak_per_rank"]) == 2
    assert len(record["time"]["step_s"]) == 7
