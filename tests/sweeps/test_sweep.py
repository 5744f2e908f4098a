"""Sweeps of real launches: continued, held by one, ended cleanly; and every outcome is a row."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from study.cli.progress import CLEAR, Progress
from study.core import machine, operators
from study.core.errors import Stop
from study.records import store
from study.sweeps import launches, protocol, sweep
from study.sweeps.launches import INTERRUPTED
from study.sweeps.protocol import Cell
from study.sweeps.sweep import Outcome

PART = {"name": "p", "arm": "single", "data": "embedded", "init": "random", "train_rows": 96, "eval_rows": 16}
PART |= {"instruments": False, "steps": 6, "seed": [1, 2, 3], "tiny": {}}
LATE = Stop("it took longer than 60 s", "wait", "timeout")


def turns(**changes) -> list[Cell]:
    """The cells of a protocol of one part: three quick ones."""
    return protocol.cells({"file": "mini.toml", "name": "mini", "part": [PART | changes]}, "tiny")


class Listener:
    """Stands for the progress of a sweep, and keeps what it hears."""

    def __init__(self):
        self.started, self.ends = [], []

    def start(self, turn):
        self.started.append(turn)

    def end(self, turn, outcome):
        self.ends.append(outcome)

    def step(self, *_):
        pass


def swept(cells: list[Cell], runs: Path, listener: Listener | None = None, **options) -> list[Outcome]:
    return sweep.sweep(cells, runs, **{"timeout_s": 300, "nvme_dir": None} | options, progress=listener or Listener())


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """What sleeps here is ended soon: no step is timed, and no rank needs seconds to write where it is."""
    monkeypatch.setattr(launches, "POLL_S", 0.1)
    monkeypatch.setattr(launches, "ANSWERS_WITHIN_S", 0.2)


@pytest.fixture
def launching(monkeypatch):
    """A function that replaces the launch of a cell by another command, in which {} is the run folder."""

    def by(*words: str) -> None:
        command = lambda cell, folder, *_: [word.replace("{}", str(folder)) for word in words]  # noqa: E731
        monkeypatch.setattr(launches, "command", command)

    return by


def statuses(runs: Path) -> dict[str, str]:
    return {path.parent.name: json.loads(path.read_text())["status"] for path in runs.glob("*/record.json")}


def working_on(runs: Path) -> list[psutil.Process]:
    named = [process for process in psutil.process_iter(["cmdline"]) if str(runs) in str(process.info["cmdline"])]
    return [process for process in named if process.status() != psutil.STATUS_ZOMBIE]


# --- what is run ---------------------------------------------------------------------------------------------------


def test_repeats_go_there_and_back():
    planned = [f"{turn.repeat}{turn.settings['seed']}" for turn in sweep.plan(turns(), 3)]
    assert " ".join(planned) == "11 12 13 23 22 21 31 32 33"


def test_filters_choose():
    cells = protocol.cells(protocol.read("smoke"), "tiny")
    chosen = sweep.chosen(cells, ("arm=zero3*", "task=imdb"))
    assert {cell.arm for cell in chosen} == {"zero3", "zero3_hpz", "zero3_cpu", "zero3_nvme"}
    assert sweep.chosen(cells, ("seed=42",)) == cells, "a setting that the protocol leaves at its default"


def test_two_sweeps_do_not_share_a_folder(tmp_path):
    with sweep.lock_runs_folder(tmp_path), pytest.raises(Stop, match="holds"), sweep.lock_runs_folder(tmp_path):
        pass
    with pytest.raises(Stop, match=r"cannot be used \(Not a directory\)"), sweep.lock_runs_folder(Path("/dev/null/a")):
        pass


def test_what_a_machine_cannot_run_is_a_row_and_not_launched(tmp_path, monkeypatch):
    monkeypatch.setattr(launches, "command", lambda *_: pytest.fail("it is launched"))
    monkeypatch.setattr(sweep, "num_gpus", lambda: 0)
    cell = protocol.cells(protocol.read("smoke"), "one_gpu")[0]
    (outcome,) = swept([replace(cell, repeat=2)], tmp_path)
    record = store.load(tmp_path / f"{cell.name}-r2.0")
    assert outcome.status == record.status == "failed"
    assert record.cell.model_dump() == {"protocol": "smoke", "part": "arms", "scale": "one_gpu", "repeat": 2}
    assert "needs a GPU" in record.error.message
    assert sweep.why_not(cell, gpus=1) is None
    assert "2 ranks need as many GPUs" in sweep.why_not(replace(cell, ranks=2), gpus=1).what
    (tiny, *_) = turns(arm="ddp")
    assert sweep.why_not(replace(tiny, ranks=4), gpus=0) is None, "ranks may share a core"
    assert "100000000 ranks take 30000 TB of host memory" in sweep.why_not(replace(tiny, ranks=10**8), gpus=0).what
    assert "where states are on a disk" in sweep.why_not(turns(arm="zero3_nvme", save_every=3)[0], gpus=0).what


# --- what a launch leaves ------------------------------------------------------------------------------------------


def test_a_failure_that_is_told_before_the_time_is_up_stays(tmp_path, monkeypatch, launching):
    """It hangs while it leaves. It is ended, and its reason is kept."""
    store.write(tmp_path, store.ended(store.new("run", []), Stop("the trainer's", "what to do"), "Stop"))
    launching("sh", "-c", f"cp {tmp_path}/record.json {{}}; sleep 60")
    runs = tmp_path / "runs"
    monkeypatch.setattr(launches, "out_of_time", lambda *_: LATE if statuses(runs) else None)
    assert swept(turns()[:1], runs)[0].reason == "the trainer's. What to do: what to do"


def test_a_launch_that_leaves_no_record_is_a_row_with_its_cell(tmp_path, launching, monkeypatch):
    """And what it was launched with says which cell it is, but nothing of another launcher.

    Where srun or torchrun started the sweep, Accelerate would pass theirs on to its only process.
    """
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "theirs")
    launching("sh", "-c", f"echo ${{RANK-none}} ${{TORCHELASTIC_RUN_ID-none}} ${store.CELL}; exit 3")
    swept(turns()[:1], tmp_path)
    record = store.load(tmp_path / f"{turns()[0].run_name}.1")
    cell = {"protocol": "mini", "part": "p", "scale": "tiny", "repeat": 1}
    assert record.cell.model_dump() == cell
    assert (record.requested.arm, record.requested.seed, record.requested.steps) == ("single", 1, 6)
    told = record.error.message.partition("exit code 3 and no record of why: none none ")[2]
    assert json.loads(told) == cell, "what the trainer is told"


def test_a_run_folder_that_is_removed_costs_one_cell(tmp_path, monkeypatch):
    removes = lambda cell, folder, *_: ["rm", "-r", str(folder)] if cell.settings["seed"] == 2 else ["true"]  # noqa: E731
    monkeypatch.setattr(launches, "command", removes)
    listener = Listener()
    outcomes = swept(turns(), tmp_path, listener)
    assert [outcome.status for outcome in outcomes] == ["failed"] * 3
    assert "its folder could not be used ([Errno 2] No such file" in outcomes[1].reason
    assert listener.ends == outcomes
    assert len(statuses(tmp_path)) == 2


@pytest.mark.parametrize("fault", ["full", "gone"])
def test_a_sweep_that_can_keep_nothing_stops_in_a_sentence(tmp_path, monkeypatch, launching, fault):
    def full(*_):
        raise OSError(28, "No space left on device")

    launching("rm", "-r", str(tmp_path / "runs"))
    if fault == "full":
        launching("true")
        monkeypatch.setattr(store, "write", full)
    with pytest.raises(Stop, match=r"the sweep cannot write to .*runs \(No "):
        swept(turns(), tmp_path / "runs")


def test_a_cell_continues_from_the_last_checkpoint_of_its_tries(tmp_path, monkeypatch):
    """But not from one that was made with other versions: it would be refused in every sweep."""
    (turn, *_) = turns(save_every=3)
    told = []
    monkeypatch.setattr(launches, "command", lambda cell, *_: told.append(launches.options(cell.settings)) or ["true"])
    for number, versions in enumerate(({}, {}, {"torch": "1.0"}), 1):
        folder = tmp_path / f"{turn.run_name}.{number}"
        (folder / "checkpoints" / f"step-0000000{number}").mkdir(parents=True)
        record = store.ended(turn.new_record(folder), INTERRUPTED, "Stop")
        store.write(folder, record.model_copy(update={"software": machine.versions() | versions}))
    swept([turn], tmp_path)
    assert told[0][-2:] == ["--resume", str(tmp_path / f"{turn.run_name}.2")]
    assert store.load(tmp_path / f"{turn.run_name}.4").requested.resume == told[0][-1]
    swept(turns()[:1], tmp_path)
    assert "--resume" not in told[1]


def test_what_a_cell_lacks_is_compiled_before_it_and_in_no_time_of_a_run(tmp_path, monkeypatch):
    """`make study` begins with the arms that lack least."""
    cells = sweep.chosen(turns(arm=["zero1_cpu", "fsdp2_cpu", "single"], seed=1), ("offload=none",))
    assert [cell.arm for cell in cells] == ["single"]
    happened = []
    monkeypatch.setattr(operators, "missing", lambda gpus, arms: ["cpu_adam"] if arms == ("zero1_cpu",) else [])
    monkeypatch.setattr(operators, "compile_missing", happened.append)
    for cell in turns(arm=["zero1_cpu", "single"], seed=1):

        def launch(cell):
            happened.append(cell.arm)
            raise OSError("it does not start here")

        sweep.outcome_of(cell, tmp_path, math.inf, launch)
    assert happened == [("zero1_cpu",), "zero1_cpu", "single"]


def test_only_numbered_folders_are_tries_of_a_turn(tmp_path):
    (turn, *_) = turns()
    for end in ("1", "10", "9", "1.bak", "", "\N{SUPERSCRIPT TWO}"):
        (tmp_path / f"{turn.run_name}.{end}").mkdir(parents=True)
    assert sorted(sweep.attempts(tmp_path, turn)) == [1, 9, 10]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"status": "well"}'], ids=["deep", "short"])
def test_a_record_that_cannot_be_read_is_none(tmp_path, launching, text):
    """One of an earlier try costs one more try, and what a launch has left is replaced."""
    (turn, *_) = turns()
    broken = tmp_path / f"{turn.run_name}.1" / "record.json"
    broken.parent.mkdir()
    broken.write_text(text)
    launching("cp", str(broken), "{}/record.json")
    swept([turn], tmp_path)
    assert store.load(tmp_path / f"{turn.run_name}.2").status == "failed"


LINES = '{"step": 2, "loss": 0.5}\n{"step": 3, "loss": null}\n{"step": 3, "eval_loss": 0.5}\n{"step": 4'


def test_the_newest_step_is_shown_and_how_a_turn_ended(tmp_path, monkeypatch, capsys):
    """On a terminal. A virtual rank has no loss, and half a line is not read."""
    assert launches.last_step(tmp_path) == {}
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    progress = Progress(2)
    progress.start(turns(model="m" * 80)[0])
    progress.step(tmp_path, 7.0)
    progress.start(turns()[0])
    for end in ("", ', "loss": 0.25}\n5\n'):
        (tmp_path / "steps.jsonl").write_text(LINES + end)
        progress.step(tmp_path, 7.0)
    progress.end(turns()[0], Outcome("failed", "why"))
    for _ in range(2):
        progress.end(turns()[0], Outcome("done"))
    progress.say_done_before()
    shown = capsys.readouterr().out
    assert max(map(len, shown.replace(CLEAR, "\n").splitlines())) < 60, "a line that moves is one row"
    assert "  failed: why\n" in shown
    assert "2 cells done before\n" in shown
    assert "  step 3  7 s" in shown
    assert "  step 4  7 s" in shown


# --- how a launch is ended -----------------------------------------------------------------------------------------


STOPPED = "import os, signal, time; os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)"


@pytest.mark.parametrize("then", ["wait", "exit 1"])
def test_a_rank_that_is_stopped_or_has_lost_its_launcher_is_ended_at_once(tmp_path, then):
    """SIGTERM does not reach a stopped process before it goes on."""
    folder = tmp_path / "run"
    launcher = subprocess.Popen(["sh", "-c", f"{sys.executable} -c '{STOPPED}' --run-dir {folder} & {then}"])
    if then == "exit 1":
        launcher.wait()
    while not any(process.status() == psutil.STATUS_STOPPED for process in launches.family(launcher, folder)):
        time.sleep(0.05)
    started = time.monotonic()
    launches.end(launcher, folder)
    assert time.monotonic() - started < 5
    assert working_on(folder) == []
    assert (launcher.returncode == 1) == (then == "exit 1")


DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"


def test_ctrl_c_while_a_launch_is_being_ended_ends_it_now(tmp_path, launching):
    """The launch does not heed SIGTERM. Nothing of it is left, and its record says that it was interrupted."""
    launching(sys.executable, "-c", DEAF, "--run-dir", "{}")
    listener = Listener()

    def interrupt(*_):
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()  # while it waits for the launch to end
        raise KeyboardInterrupt

    listener.step = interrupt
    with pytest.raises(KeyboardInterrupt):
        swept(turns(), tmp_path, listener)
    assert working_on(tmp_path) == []
    assert list(statuses(tmp_path).values()) == ["killed"]
