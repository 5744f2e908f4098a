"""What follows a training may fail, on one rank or on all: the run stays done, says why, and nobody waits for ever."""

import time
import types

import pytest

from study.core.arms import all_paths, read
from study.core.settings import TrainerFlags, resolve
from study.measure.clock import Clock
from study.records import metrics, store
from study.training import ending, finish
from study.training.data import load_data
from study.training.run import OpenRun
from tests import shaped
from tests.conftest import ranks_of

RANK = '''
"""One of two ranks whose training is over. The second fails in its instruments, in the way that the test names."""

import os, signal, sys, time
from pathlib import Path

import torch.distributed as dist
from accelerate import Accelerator
from study.records import store
from study.records.schema import Record
from study.training import ending, finish
from study.training.display import log_to, print_summary
from study.training.run import OpenRun
from study.core.settings import TrainerFlags
from study.measure.heartbeat import Heartbeat

folder, way = Path(sys.argv[1]), sys.argv[2]
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it comes 0.1 s after another rank has died: too soon on a busy machine
accelerator = Accelerator(cpu=True)
rank = accelerator.process_index


def instruments(run, step):
    if rank == 1 and way == "killed":
        os.kill(os.getpid(), 9)
    if rank == 1 or way == "all":
        raise NotImplementedError(f"collective x on rank {rank}")
    dist.barrier()


finish.inspect = instruments
log_to(folder if rank == 0 else None)
record = store.load(folder) if rank == 0 else Record(run_id="run", started_utc=store.now_utc())
run = OpenRun(TrainerFlags(save=False), None, folder, record, Heartbeat(folder, rank))
run.accelerator = accelerator
in_step = finish.after_training(run, None)
assert not in_step
print_summary(run)
ending.leave(0)
'''


@pytest.fixture
def folder(tmp_path):
    """A run whose training is over, before it is said to be done."""
    store.write(tmp_path, shaped.record(status="running", finished_utc=None))
    return tmp_path


@pytest.mark.parametrize("way", ["one", "all", "killed"])
def test_an_instrument_that_fails_leaves_the_run_done(way, folder):
    started = time.monotonic()
    ranks = ranks_of(RANK, folder, str(folder), way)
    assert time.monotonic() - started < 120
    kept = store.load(folder)
    assert (kept.status, kept.error) == ("done", None), ranks.output
    assert kept.loss.train[-1] == 2.0, "what the training gave is there"
    reason = kept.observed.instruments_failed
    if way == "killed":
        assert reason == "another rank ended without an error message"
        return
    assert ranks.code == 0, ranks.output
    assert reason.startswith("NotImplementedError: collective x on rank ")
    assert way == "all" or reason.endswith("rank 1"), "the rank that failed, not the one that missed it"
    assert ranks.output.count(f"but without its instruments ({reason})") == 1, ranks.output
    assert "NotImplementedError" in (folder / "log.txt").read_text()


ALONE = types.SimpleNamespace(is_main_process=True, num_processes=1, wait_for_everyone=lambda: None)  # an Accelerator
STILL = types.SimpleNamespace(beat=lambda position: None)  # a heartbeat


@pytest.mark.parametrize("part", ["save", "instruments"])
@pytest.mark.parametrize("error", [KeyboardInterrupt("SIGINT"), MemoryError()])
def test_the_training_is_kept_before_what_follows_it(part, error, folder, monkeypatch, capsys):
    """By the time that the weights are saved, and then the instruments begin, the record on the disk is done."""
    seen = []

    def fail(run, *_):
        seen.append(store.load(folder))
        raise error

    monkeypatch.setattr(finish, "save", fail if part == "save" else lambda *_: None)
    monkeypatch.setattr(finish, "inspect", fail)
    run = OpenRun(TrainerFlags(save=True), None, folder, store.load(folder), STILL)
    run.accelerator = ALONE
    assert finish.after_training(run, None) is False
    (before,), kept = seen, store.load(folder)
    assert before.status == kept.status == "done"
    assert getattr(before.observed, f"{part}_failed") == store.UNFINISHED, "what a SIGKILL would leave"
    assert getattr(kept.observed, f"{part}_failed") == ending.reason(error).what
    later = kept.observed.instruments_failed
    assert later == (store.UNFINISHED if part == "save" else ending.reason(error).what)
    assert f"but without its {part}" in capsys.readouterr().out


def test_rates_are_over_the_wall_time_of_the_windows(monkeypatch):
    """Two ranks that wait for each other before each of two windows, and are slow in turns within the first."""
    clocks = [Clock(), Clock()]
    for clock, windows in zip(clocks, ([[0.9, 1.1], [1.0]], [[1.1, 0.9], [2.0]]), strict=True):
        for step_s in windows:
            clock.step_s += step_s
            clock.window_s.append(sum(step_s))
    record = shaped.record()
    run = OpenRun(TrainerFlags(), types.SimpleNamespace(row_ranks=1), None, record, STILL)
    run.accelerator = ALONE
    run.gathered = lambda mine: [clock.step_s if mine is clocks[0].step_s else clock.window_s for clock in clocks]
    monkeypatch.setattr(finish, "flops_per_row", lambda _: 1e9)
    times = finish._times(run, clocks[0])
    assert times.step_s == [1.1, 1.1, 2.0]
    assert times.window_s == pytest.approx(2.0 + 2.0), "not 1.1 + 1.1 + 2.0"
    assert metrics.tokens_per_s(record) == pytest.approx(record.observed.tokens_per_step * 3 / 4.0)
    assert metrics.value(record, "step_s") == 1.1


def test_operations_are_counted_once_for_all_that_decides_them(tmp_path, monkeypatch):
    """Another length, task or vocabulary is another count, and each is the cached one when it is asked for again."""

    def counted(task: str, model: str, sequence: int) -> float:
        flags = TrainerFlags(task=task, model=model, sequence=sequence, train_rows=16, eval_rows=8, cache_dir=tmp_path)
        run = OpenRun(resolve(flags, gpu=False), read(all_paths()["ddp"]), tmp_path, shaped.record(), STILL)
        run.data = load_data(run.settings)
        return finish.flops_per_row(run)

    asked = [("imdb", "bert-tiny", 8), ("imdb", "bert-tiny", 16), ("wikitext", "gpt-tiny", 16)]
    asked.append(("wikitext", "llama-micro", 16))
    first = [counted(*each) for each in asked]
    assert len({*first}) == len(asked)
    monkeypatch.setattr(finish, "FlopCounterMode", pytest.fail)
    assert [counted(*each) for each in asked] == first
