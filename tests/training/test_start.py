"""The run folder and the disk folder: whose they are, what is refused, and how much room is asked for."""

import time
from pathlib import Path

import pytest

from study.core import operators
from study.core.arms import all_paths, read
from study.core.errors import Stop
from study.core.settings import TrainerFlags, resolve
from study.records import store
from study.training import setup
from study.training.launch import Launch

LAUNCH = Launch(pid=7, started=time.time(), config_file="x", num_processes=None)


def opened(folder: Path | None, rank: int = 0) -> Path:
    settings = resolve(TrainerFlags(run_dir=folder), gpu=False)
    path, record = setup.open_folder(settings, read(all_paths()["ddp"]), LAUNCH, rank)
    if rank == 0:
        assert record == store.load(path), "the trainer goes on with what it has written, and reads nothing again"
    return path


def test_a_sweeps_output_may_be_in_the_folder(tmp_path):
    (tmp_path / "output.txt").write_text("launching")
    assert opened(tmp_path) == tmp_path
    assert store.load(tmp_path).status == "running"
    assert (tmp_path / "output.txt").read_text() == "launching"


@pytest.mark.parametrize("name", ["record.json", ".git"])
def test_a_file_of_somebody_else_is_not_added_to(name, tmp_path):
    (tmp_path / name).write_text("mine")
    with pytest.raises(Stop, match=f"already holds {name}"):
        opened(tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


def test_one_rank_of_a_machine_says_that_an_operator_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(operators, "load", lambda names, gpus, tell: tell(f"compiling {names[0]}"))
    for rank, said in (("1", False), ("0", True)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        setup.load_operators(["cpu_adam"], tmp_path)
        log = tmp_path / "log.txt"
        assert (log.exists() and "compiling cpu_adam" in log.read_text()) == said


@pytest.mark.parametrize(("world", "local", "share"), [(1, 1, 1), (2, 2, 1), (4, 2, 2), (8, 1, 8)])
def test_a_machine_needs_room_for_its_own_ranks_alone(world, local, share, tmp_path, monkeypatch):
    """Two machines hold a half each. A virtual rank is one of N, and holds an Nth."""
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    asked = []
    monkeypatch.setattr(setup.machine, "make_swap_folder", lambda *given: asked.append(given))
    settings = resolve(TrainerFlags(task="wikitext", model="gpt2"), gpu=False)
    claimed = setup.claim_disk(settings, read(all_paths()["zero3_nvme"]), LAUNCH, tmp_path / "run")
    assert claimed == tmp_path / "nvme/run-7"
    assert asked == [(claimed, 124_439_808 * setup.machine.BYTES_PER_PARAMETER // share)]
