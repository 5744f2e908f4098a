"""What a user does wrong, or a machine lacks: one sentence with the remedy, no traceback, nothing left behind."""

import pytest
import yaml

from study.records.sections import MemoryCap
from tests.conftest import MICRO, launch, left_running, traceback_of_ours

SHORT = ("--steps", "6", "--train-rows", "96", "--eval-rows", "16", "--no-instruments")

MISTAKES = {  # a launch each; what the settings, an arm's file or a data folder can have wrong is tested without one
    "micro-batch 0": ("ddp", ("--micro-batch", "0"), ("--micro-batch must be greater than 0 (got 0)",)),
    "more rows than there are": ("ddp", ("--train-rows", "10"), ("16 sequences", "there are 10", "--micro-batch")),
    "a disk folder that is a file": ("zero3_nvme", ("--nvme-dir", "README.md"), ("README.md", "--nvme-dir")),
}


def assert_ended(run, status: str, *words: str) -> None:
    """It failed in one sentence, with these words in it, and left no process."""
    record = run.record
    sentence = f"{record.error.message}. What to do: {record.error.what_to_do}."
    assert run.code == 1, "in every spelling, and by no signal"
    assert not traceback_of_ours(run.output), run.output
    assert record.status == status
    assert sentence in run.output
    assert run.output.count("What to do:") == 1, "the ranks do not all talk at once"
    assert [word for word in words if word not in sentence] == []
    assert left_running(run.folder) == []
    assert run.seconds < 120


def test_too_little_memory_is_not_the_trainers_fault(tmp_path, cache):
    """Under a cap of half a GiB: a small batch is done, a large one is refused its memory by the kernel."""
    flags = (*SHORT, "--task", "wikitext", "--train-rows", "2000", "--memory-cap-gib", "0.5")
    small = launch("ddp", tmp_path / "small", *flags, "--micro-batch", "2", cache=cache)
    assert small.code == 0, small.output
    assert small.record.observed.memory_cap == MemoryCap(bytes=2**29, emulated_by="RLIMIT_DATA")
    large = launch("ddp", tmp_path / "large", *flags, "--micro-batch", "256", cache=cache)
    assert_ended(large, "oom", "tried to allocate", "--memory-cap-gib")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_one_sentence(mistake, tmp_path, cache):
    arm, flags, words = MISTAKES[mistake]
    alone = ("--num_processes", "1") if arm == "zero3_nvme" else ()  # one rank is enough to look at a disk
    run = launch(arm, tmp_path / "run", *flags, cache=cache, launcher=alone)
    assert_ended(run, "failed", *words)
    assert not list(tmp_path.glob("nvme/*")), "the disk folder is gone"


def test_a_loss_that_explodes_is_a_diverged_run(tmp_path, cache):
    assert_ended(launch("ddp", tmp_path / "run", *SHORT, *MICRO, "--lr", "1e15", cache=cache), "diverged", "--lr")


def test_a_yaml_that_deepspeed_reads_otherwise_is_refused(tmp_path, cache):
    """In a yaml, Accelerate takes a clipping of 0.0 for none given, and DeepSpeed then clips at 1.0."""
    arm = {"num_machines": 1, "num_processes": 1, "main_process_port": 0, "distributed_type": "DEEPSPEED"}
    arm["deepspeed_config"] = {"zero_stage": 2, "gradient_clipping": 0.0}
    (tmp_path / "arm.yaml").write_text(yaml.safe_dump(arm))
    run = launch(tmp_path / "arm.yaml", tmp_path / "run", *SHORT, cache=cache)
    assert_ended(run, "failed", "clipping: promised 0.0, observed 1.0")


# What strikes a rank (see dying.py), and words of the sentence.
STRIKES = {
    "SIGSEGV study.train optimizer_step 3 1": ("rank 1 was killed by SIGSEGV",),
    "SIGKILL study.train optimizer_step 3 1": ("rank 1 was killed by SIGKILL",),
    "exit study.train optimizer_step 3 1": ("sys.exit(0) ended the process at dying.py:",),
}


@pytest.mark.parametrize("fault", STRIKES)
def test_how_a_rank_ended_is_named(fault, tmp_path, cache, monkeypatch):
    monkeypatch.setenv("FAULT", fault)
    run = launch("ddp", tmp_path / "run", *SHORT, *MICRO, cache=cache, script="tests/dying.py")
    assert_ended(run, "failed", *STRIKES[fault])
    assert run.record.error.where == "rank 1"


# What fills the disk in which run, and words of the sentence. Without a save the record is the first that needs room.
SAVES = ("--save-every", "2")
FULL = [
    ("zero2", "fill torch save 1 1", SAVES, "a file could not be written whole: the disk of"),
    ("fsdp2", "fill torch save 2 0", SAVES, "a file could not be written whole: the disk of"),
    ("zero2", "fill study.train optimizer_step 3 0", (), "cannot be written or opened (No space left on device)"),
]


@pytest.mark.parametrize(("arm", "fault", "saves", "words"), FULL)
def test_a_disk_that_is_full_in_a_save_or_between_is_said_and_recorded(
    arm, fault, saves, words, small_disk, cache, monkeypatch
):
    monkeypatch.setenv("FAULT", fault)
    flags = (*SHORT, "--warmup-steps", "1", "--log-every", "1", "--task", "wikitext", "--model", "llama-micro", *saves)
    run = launch(arm, small_disk / "run", *flags, cache=cache, script="tests/dying.py")
    assert_ended(run, "failed", "make room", words)
    assert len(run.record.loss.train) == (2 if saves else 6), "as it wrote them step by step"


def test_a_folder_that_is_removed_in_the_middle_is_said(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("FAULT", "remove study.train optimizer_step 3 0")
    run = launch("ddp", tmp_path / "run", *SHORT, *MICRO, cache=cache, script="tests/dying.py")
    assert run.code == 1
    assert "run was removed, or its record.json. What to do: start it again" in run.output
    assert run.output.count("What to do:") == 1
    assert not traceback_of_ours(run.output)


CHANGES_WEIGHTS = """
from study.train import train
from study.training import main, setup

wrap = setup._wrap

def wrap_and_change(run, model):
    wrap(run, model)
    next(run.model.parameters()).data.add_(1)

setup._wrap = wrap_and_change
main.main(train)
"""


def test_weights_that_preparing_changes_are_noticed(tmp_path, cache):
    (tmp_path / "changes.py").write_text(CHANGES_WEIGHTS)
    run = launch("single", tmp_path / "run", *SHORT, *MICRO, cache=cache, script=str(tmp_path / "changes.py"))
    assert_ended(run, "failed", "weights: preparing the model changed them")


@pytest.mark.slow
def test_partitions_too_small_for_the_disk_are_not_called_done(tmp_path, cache):
    """Under 1 MiB a partition stays in memory: four ranks of the smallest model, and no byte reaches the disk."""
    flags, four = (*SHORT, "--task", "wikitext", "--micro-batch", "2"), ("--num_processes", "4")
    run = launch("zero3_nvme", tmp_path / "run", *flags, cache=cache, launcher=four)
    assert_ended(run, "failed", "nothing was swapped there")
    assert run.record.observed.ranks == 4, "what was seen is kept, though the run failed"
    assert run.record.loss.train
    assert not list(tmp_path.glob("nvme/*")), "the disk folder is left empty"
