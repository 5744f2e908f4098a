"""A run that was killed and continues is the run that was never killed: losses, rates, order, dropout and weights."""

import dataclasses
import re
import shutil
import types

import pytest
from safetensors.torch import load_file

from study.core import digests, optimizers
from study.core.arms import NAMES, load_arm
from study.core.errors import Stop
from study.core.settings import TrainerFlags
from study.records import metrics, store
from study.training import checkpoints
from study.training.run import History
from tests.conftest import DECODERS_ALONE, MICRO, RANKS, Launched, launch, table, traceback_of_ours

# Two passes in a step, two steps in an epoch: the checkpoint of step 6 stands within one.
FLAGS = "--steps 9 --warmup-steps 2 --sequence 32 --micro-batch 4 --accumulation 2 --train-rows 48 --eval-rows 16"
SAVES = "--no-instruments --save --save-every 3 --eval-every 3 --log-every 4"
FLAGS = (*FLAGS.split(), *SAVES.split(), *MICRO)
DECODER = ("--task", "wikitext", "--model", "llama-micro")  # two ranks share a row
QUICK = ("ddp", "zero3", "fsdp2")  # a library each; below, runs of stage 2 are killed
OTHERS = [arm for arm in NAMES if arm not in (*QUICK, "zero3_nvme")]


@pytest.fixture
def train(tmp_path, cache, monkeypatch):
    """A function that trains in a folder of this name, continues a run, and may lose a rank: see tests/dying.py."""

    def train(arm: str, name: str, *flags: str, resume: Launched | None = None, dies: str = "") -> Launched:
        monkeypatch.setenv("FAULT", f"SIGKILL {dies}" if dies else "")
        launcher = ("--num_processes", "4") if RANKS.get(arm) == 4 else ()
        words = ("--resume", str(resume.folder)) if resume else ()
        return launch(arm, tmp_path / name, *flags, *words, cache=cache, launcher=launcher, script="tests/dying.py")

    return train


def saved(run: Launched) -> list[str]:
    return sorted(path.name for path in (run.folder / "checkpoints").iterdir())


def assert_equal(again: Launched, whole: Launched) -> None:
    """Bit for bit."""
    assert again.code == 0, again.output
    assert again.steps == whole.steps
    losses = [line["loss"] for line in whole.steps if "loss" in line]
    assert len(set(losses)) == 9, "a curve on which a step too many would show"
    assert again.record.loss == whole.record.loss
    assert again.record.observed.learning_rates == whole.record.observed.learning_rates
    ours, theirs = (load_file(run.folder / "model/model.safetensors") for run in (again, whole))
    assert ours.keys() == theirs.keys()
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize("arm", [*QUICK, *(pytest.param(arm, marks=pytest.mark.slow) for arm in OTHERS)])
def test_continued_is_never_stopped(arm, train, trained):
    """A run that ended well leaves the same checkpoint as one that was killed: below, some are."""
    flags = (*FLAGS, *DECODER) if arm in DECODERS_ALONE else FLAGS
    whole = trained(arm, *flags)
    assert saved(whole) == ["step-00000003", "step-00000006"]
    again = train(arm, "again", *flags, resume=whole)
    assert_equal(again, whole)
    assert again.record.checkpoints == {"resumes": [{"run_id": whole.record.run_id, "step": 6}]}
    assert len(whole.record.time.step_s) == 7, "of the whole run"
    assert len(again.record.time.step_s) == 1, "of three steps after a resume two are warm-up"


@pytest.mark.parametrize("arm", ["fsdp2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_saving_changes_nothing(arm, trained):
    without = [flag for flag in FLAGS if flag != "--save-every"]
    without.remove("3")
    assert trained(arm, *without).steps == trained(arm, *FLAGS).steps


def assert_killed(run: Launched, step: int) -> None:
    """It has left a checkpoint after this step, and its record has the losses that it wrote."""
    assert run.code != 0
    assert not traceback_of_ours(run.output)
    assert store.checkpoints(run.folder)[-1].name == f"step-0000000{step}"
    assert run.record.status != "done"
    assert run.record.loss.train == [line["loss"] for line in run.steps if "loss" in line]
    assert [each.step for each in run.record.loss.eval] == [3, 6]


def test_two_kills_lose_nothing_that_was_saved(train, trained):
    """Rank 1 in the second save; then, in the run that continues, rank 0 in the eighth step, its fifth."""
    killed = train("zero2", "killed", *FLAGS, dies="torch save 4 1")
    assert_killed(killed, 3)
    twice = train("zero2", "twice", *FLAGS, dies="study.train optimizer_step 5 0", resume=killed)
    assert_killed(twice, 6)
    assert_equal(train("zero2", "again", *FLAGS, resume=twice), trained("zero2", *FLAGS))


@pytest.mark.parametrize(
    ("dies", "every", "left"),
    [
        ("os sync 2 0", 3, ["step-00000003", "step-00000006.part"]),
        ("study.core.digests write 2 0", 3, ["step-00000003", "step-00000006.part"]),
        ("study.training.checkpoints rmtree 1 0", 2, ["step-00000002", "step-00000004", "step-00000006"]),
    ],
)
def test_a_kill_while_checkpoints_are_renamed_or_removed_leaves_a_whole_one(dies, every, left, train):
    """Rank 0 before the second gets its digests, before it gets its name, and as the first of three is removed."""
    run = train("zero2", "killed", *FLAGS, "--save-every", str(every), dies=dies)
    assert_killed(run, int(left[-1][-1]) if every == 2 else 3)
    assert saved(run) == left
    assert digests.damaged(store.checkpoints(run.folder)[-1]) == []


def test_a_damaged_checkpoint_is_refused_and_the_one_before_goes_on(train, trained, tmp_path):
    """64 bytes of an optimizer's states: no library notices."""
    whole = trained("zero2", *FLAGS)
    copy = dataclasses.replace(whole, folder=shutil.copytree(whole.folder, tmp_path / "copy"))
    before, last = store.checkpoints(copy.folder)
    file = next(last.rglob("*rank_1*optim_states.pt"))
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(
        content[:middle] + bytes(byte ^ 1 for byte in content[middle : middle + 64]) + content[middle + 64 :]
    )
    refused = train("zero2", "refused", *FLAGS, resume=copy)
    assert (refused.code, refused.record.status) == (1, "failed")
    name = file.relative_to(last)
    assert f"the checkpoint {last} is damaged: 1 file not as written, such as {name}." in refused.output
    assert f"What to do: remove it, and the run continues from {before.name}." in refused.output
    assert not traceback_of_ours(refused.output)
    shutil.rmtree(last)
    again = train("zero2", "again", *FLAGS, resume=copy)
    assert again.record.checkpoints["resumes"][0]["step"] == 3
    assert_equal(again, whole)


def test_the_loss_scale_goes_on(train):
    """DeepSpeed's checkpoints do not have it. Here it doubles every four steps, and is no more what it was at first."""
    flags = (*FLAGS, "--precision", "fp16")
    whole = train("zero2", "whole", *flags)
    again = train("zero2", "again", *flags, resume=whole)
    assert whole.record.observed.loss_scale == again.record.observed.loss_scale == 4 * 65536
    assert_equal(again, whole)


def test_what_a_library_only_logs_is_a_sentence(train, trained, tmp_path):
    """Accelerate goes on without the random states of a rank that were never saved."""
    run = trained("zero2", *FLAGS)
    copy = shutil.copytree(run.folder, tmp_path / "copy")
    last = store.checkpoints(copy)[-1]
    (last / "random_states_1.pkl").unlink()
    digests.write(last)
    again = train("zero2", "again", *FLAGS, resume=dataclasses.replace(run, folder=copy))
    assert again.record.status == "failed"
    assert "has lost random states, or lines of steps.jsonl. What to do: name the folder" in again.output
    assert not traceback_of_ours(again.output)


def test_another_training_is_not_continued(trained):
    before = trained("zero2", *FLAGS).record
    after = before.model_copy(deep=True)
    after.requested.save_every = after.requested.run_dir = after.requested.config_file = None
    checkpoints.refuse_another(before, after)
    after.requested.lr = 0.5
    after.observed.ranks = 4
    after.software["torch"] = "1.0"
    after.observed.deepspeed["zero_optimization"]["overlap_comm"] = False  # in the file of the arm that has its name
    with pytest.raises(Stop) as caught:
        checkpoints.refuse_another(before, after)
    for words in (
        r"torch was 2\S+ and is 1.0;",
        "; lr was 0.001 and is 0.5;",
        "; ranks was 2 and is 4;",
        r"; deepspeed\.zero_optimization\.overlap_comm was True and is False$",
    ):
        assert re.search(words, caught.value.what)


@pytest.mark.parametrize("name", ["trained", "nowhere"])
def test_a_folder_without_a_checkpoint_is_a_sentence(name, tmp_path):
    if name == "trained":
        store.write(tmp_path / name, store.new(name, []))
        for unfinished in ("step-00000003.part", "step-of-mine"):
            (tmp_path / name / "checkpoints" / unfinished).mkdir(parents=True)
    run = types.SimpleNamespace(
        optimizer=types.SimpleNamespace(optimizer=None), settings=types.SimpleNamespace(resume=tmp_path / name)
    )
    with pytest.raises(Stop, match=r"has no checkpoint|cannot be read"):
        checkpoints.begin(run, History())


@pytest.mark.parametrize(("arm", "flags", "words"), table("training/refused.toml")["checkpoints"])
def test_what_no_library_can_continue_is_refused(arm, flags, words):
    with pytest.raises(Stop, match=words):
        optimizers.check(TrainerFlags(**flags), load_arm(arm))
    if arm != "zero2":
        optimizers.check(TrainerFlags(**flags), load_arm("zero3_cpu"))


def test_of_a_resumed_run_times_and_peaks_are_of_a_part_and_not_shown(trained):
    record = trained("zero2", *FLAGS).record
    known = {name: metrics.value(record, name) for name in ("step_s", "host_peak_bytes", "tokens_per_s", "train_loss")}
    assert None not in known.values()
    record.checkpoints = {"resumes": [{"run_id": "a", "step": 6}]}
    assert {name for name in known if metrics.value(record, name) is not None} == {"train_loss"}
