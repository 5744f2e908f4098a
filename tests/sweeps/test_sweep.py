"""Sweeps of real launches: continued, held by one, ended cleanly; and every outcome is a row."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from conftest import ROOT
from shaped import record as shaped

from study.cli import commands
from study.cli.experiments import Progress
from study.core.errors import Stop
from study.records import store
from study.records.sections import Requested
from study.sweeps import launches, outcomes, protocol, sweep

MINI = """about = "three quick cells"
document = "none"
replicates = "nothing"
[[part]]
name = "p"
arm = "single"
data = "embedded"
init = "random"
train_rows = 96
eval_rows = 16
instruments = false
steps = 6
seed = [1, 2, 3]
[part.tiny]
"""
LATE = Stop("it took longer than 60 s", "wait", "timeout")


def mini(tmp_path: Path, text: str = MINI) -> Path:
    (tmp_path / "mini.toml").write_text(text)
    return tmp_path / "mini.toml"


def turns(tmp_path, text: str = MINI) -> list[protocol.Cell]:
    return sweep.plan(protocol.cells(protocol.read(str(mini(tmp_path, text))), "tiny"), 1)


class Listener:
    """Stands for the progress of a sweep, and keeps what it hears."""

    def __init__(self):
        self.started, self.ends = [], []

    def start(self, turn):
        self.started.append(turn)

    def end(self, turn, outcome):
        self.ends.append(outcome)

    def __getattr__(self, name):
        return lambda *_: None


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


def study(*words, cache: Path, **options) -> subprocess.Popen:
    command = [str(word) for word in (Path(sys.executable).with_name("study"), *words)]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"XDG_CACHE_HOME": str(cache)}, **streams, **options)


def finish(process: subprocess.Popen, timeout: float = 300) -> str:
    with process:
        output, _ = process.communicate(timeout=timeout)
    return output


def statuses(runs: Path) -> dict[str, str]:
    return {path.parent.name: json.loads(path.read_text())["status"] for path in runs.glob("*/record.json")}


def working_on(runs: Path) -> list[psutil.Process]:
    processes = [process for process in psutil.process_iter(["cmdline", "status"]) if process.info["cmdline"]]
    alive = [process for process in processes if process.info["status"] != psutil.STATUS_ZOMBIE]
    return [process for process in alive if str(runs) in " ".join(process.info["cmdline"])]


# --- what is run ---------------------------------------------------------------------------------------------------


def test_repeats_go_there_and_back(tmp_path):
    cells = turns(tmp_path)
    planned = [(turn.repeat, turn.settings["seed"]) for turn in sweep.plan(cells, 3)]
    assert planned == [(1, 1), (1, 2), (1, 3), (2, 3), (2, 2), (2, 1), (3, 1), (3, 2), (3, 3)]


def test_filters_choose():
    cells = protocol.cells(protocol.read("smoke"), "tiny")
    chosen = sweep.chosen(cells, ("arm=zero3*", "task=imdb"))
    assert {cell.arm for cell in chosen} == {"zero3", "zero3_hpz", "zero3_cpu", "zero3_nvme"}
    assert sweep.chosen(cells, ("seed=42",)) == cells, "a setting that the protocol leaves at its default"


REFUSED = {
    "--only colour=red": "--only must be a name and a pattern",
    "--only arm=zzz": "the values of arm here are single",
    "--timeout-s nan": "--timeout-s must be above 0 (got nan)",
    "--pack nowhere": "--pack nowhere holds no pack.json",
    "--runs mini.toml/below": "--runs mini.toml/below cannot be used (Not a directory)",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_sweep_that_is_refused_says_why_in_a_sentence(tmp_path, monkeypatch, capsys, words):
    mini(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.environ["PATH"])  # which main changes
    monkeypatch.setattr(sys, "argv", ["study", "sweep", "mini.toml", *words.split()])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # which it changes as well
    with pytest.raises(SystemExit) as end:
        commands.main()
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert re.fullmatch(r"[^\n]+\. What to do: [^\n]+[.?]\n", message), message
    assert REFUSED[words] in message
    assert not list(tmp_path.glob("*/record.json"))


def test_two_sweeps_do_not_share_a_folder(tmp_path):
    with sweep.lock_runs_folder(tmp_path), pytest.raises(Stop, match="holds"), sweep.lock_runs_folder(tmp_path):
        pass


def test_what_a_machine_cannot_run_is_a_row_and_not_launched(tmp_path, monkeypatch):
    monkeypatch.setattr(launches, "command", lambda *_: pytest.fail("it is launched"))
    monkeypatch.setattr(sweep, "num_gpus", lambda: 0)
    cell = protocol.cells(protocol.read("smoke"), "one_gpu")[0]
    (outcome,) = sweep.sweep([replace(cell, repeat=2)], tmp_path, 60, None, Listener())
    record = store.load(tmp_path / f"{cell.name}-r2.0")
    assert outcome.status == record.status == "failed"
    assert record.cell.model_dump() == {"protocol": "smoke", "part": "arms", "scale": "one_gpu", "repeat": 2}
    assert "needs a GPU" in record.error.message
    assert sweep.why_not(cell, gpus=1) is None
    assert "2 ranks need as many GPUs" in sweep.why_not(replace(cell, ranks=2), gpus=1).what


# --- what a launch leaves ------------------------------------------------------------------------------------------


def left(folder: Path, status: str, output: str = "", kind: str = "Stop", message: str = "the trainer's") -> bytes:
    """A run folder as a launch leaves it. Returns its record.json."""
    folder.mkdir()
    (folder / "output.txt").write_text(output)
    record = store.new(folder.name, []).model_copy(update={"requested": Requested(arm="ddp")})
    if status == "done":
        record = shaped(run_id=folder.name)
    elif status != "running":
        record = store.ended(record, Stop(message, "what to do", status, "rank 0"), kind)
    store.write(folder, record)
    (folder / ".7f.part").touch()  # of a writer that was killed
    return (folder / "record.json").read_bytes()


SIGKILLED = (
    "rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 7)",
    "traceback : Signal 9 (SIGKILL) received by PID 7",
    "died with <Signals.SIGKILL: 9>",
)
GLOO = {"kind": "RuntimeError", "message": "[gloo/tcp/pair.cc] Read error from [127.0.0.1]"}
BUG = {"kind": "ValueError", "message": "no such row"}
OOM = "the kernel killed "
OPEN = ("running", "killed", "failed")
# What the trainer left, why the sweep ended it, how many processes the kernel killed for memory: what the record says.
ENDS = [
    # what a run has found out stays when its time is up
    *[({"status": status}, LATE, 0, status, "") for status in outcomes.ANSWERS],
    # what is ended says why
    *[({"status": status}, LATE, 0, "timeout", LATE.what) for status in OPEN],
    # a rank that the kernel killed: whoever survives, the launcher alone, or a rank that torchrun ended, or another
    *[({"status": status, "output": SIGKILLED[0]}, None, 1, "oom", OOM) for status in OPEN],
    *[({"status": "failed", "output": killed}, None, 1, "oom", OOM) for killed in SIGKILLED],
    ({"status": "running"}, None, 1, "oom", OOM),
    ({"status": "failed", **GLOO}, None, 1, "oom", OOM),
    # the kernel's count is the machine's: a run that tells a reason of its own keeps it
    ({"status": "failed", **BUG}, None, 1, "failed", "no such row"),
    ({"status": "failed", "message": "the connection to the hub is lost"}, None, 1, "failed", "the hub"),
    # a rank that somebody killed is no lack of memory, and a run that somebody interrupted stays interrupted
    ({"status": "killed", "output": SIGKILLED[1]}, None, 0, "failed", "not for lack of memory"),
    ({"status": "killed", "output": SIGKILLED[1]}, None, None, "failed", "does not say"),
    ({"status": "killed"}, None, 0, "killed", ""),
]


@pytest.mark.parametrize(("leaves", "stop", "kills", "status", "words"), ENDS)
def test_how_a_launch_ended(tmp_path, leaves, stop, kills, status, words):
    before = left(tmp_path / "run", **leaves)
    record = outcomes.outcome(turns(tmp_path)[0], tmp_path / "run", 1, stop, kills)
    assert record.status == status
    assert words in (record.error.message if record.error else "")
    assert store.load(tmp_path / "run") == record
    stays = (tmp_path / "run" / "record.json").read_bytes() == before
    assert stays == (leaves["status"] == status)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["output.txt", "record.json"]


def test_a_failure_that_is_told_before_the_time_is_up_stays(tmp_path, monkeypatch, launching):
    """It hangs while it leaves. It is ended, and its reason is kept."""
    left(tmp_path / "run", "failed")
    launching("sh", "-c", f"cp {tmp_path}/run/record.json {{}}; sleep 60")
    runs = tmp_path / "runs"
    monkeypatch.setattr(launches, "out_of_time", lambda *_: LATE if statuses(runs) else None)
    outcomes = sweep.sweep(turns(tmp_path)[:1], runs, 60, None, Listener())
    assert outcomes[0].reason == "the trainer's. What to do: what to do"


def test_a_launch_that_leaves_no_record_is_a_row_with_its_cell(tmp_path, launching):
    """And what it was launched with says which cell it is."""
    launching("sh", "-c", f"echo ${store.CELL}; exit 3")
    sweep.sweep(turns(tmp_path), tmp_path / "runs", 60, None, Listener())
    record = store.load(next((tmp_path / "runs").glob(f"{turns(tmp_path)[0].name}-*")))
    cell = {"protocol": "mini", "part": "p", "scale": "tiny", "repeat": 1}
    assert record.cell.model_dump() == cell
    assert json.loads(record.error.message.partition("no record of why: ")[2]) == cell, "what the trainer is told"
    assert (record.requested.arm, record.requested.seed, record.requested.steps) == ("single", 1, 6)
    assert "exit code 3" in record.error.message


def test_a_launch_does_not_take_itself_for_a_rank_of_another_one(tmp_path, launching, monkeypatch):
    """As where a sweep is started by srun or torchrun: Accelerate would pass that on to its only process."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "theirs")
    launching("sh", "-c", "echo ${RANK-none} ${TORCHELASTIC_RUN_ID-none}; exit 3")
    (outcome,) = sweep.sweep(turns(tmp_path)[:1], tmp_path / "runs", 60, None, Listener())
    assert "no record of why: none none" in outcome.reason


def test_a_run_folder_that_is_removed_costs_one_cell(tmp_path, monkeypatch):
    removes = lambda cell, folder, *_: ["rm", "-r", str(folder)] if cell.settings["seed"] == 2 else ["true"]  # noqa: E731
    monkeypatch.setattr(launches, "command", removes)
    listener = Listener()
    outcomes = sweep.sweep(turns(tmp_path), tmp_path / "runs", 60, None, listener)
    assert [outcome.status for outcome in outcomes] == ["failed"] * 3
    assert "its folder could not be used ([Errno 2] No such file" in outcomes[1].reason
    assert listener.ends == outcomes
    assert len(statuses(tmp_path / "runs")) == 2


@pytest.mark.parametrize("fault", ["full", "gone"])
def test_a_sweep_that_can_keep_nothing_stops_in_a_sentence(tmp_path, monkeypatch, launching, fault):
    def full(*_):
        raise OSError(28, "No space left on device")

    launching("true")
    if fault == "full":
        monkeypatch.setattr(store, "write", full)
    else:
        launching("rm", "-r", str(tmp_path / "runs"))
    with pytest.raises(Stop, match=r"the sweep cannot write to .*runs \(No "):
        sweep.sweep(turns(tmp_path), tmp_path / "runs", 60, None, Listener())


def test_only_numbered_folders_are_tries_of_a_turn(tmp_path):
    turn, runs = turns(tmp_path)[0], tmp_path / "runs"
    for end in ("1", "10", "9", "bak", "1.bak", "x2", "", "\N{SUPERSCRIPT TWO}"):
        (runs / f"{turn.run_name}.{end}").mkdir(parents=True)
    (runs / f"{turn.run_name}.11").write_text("somebody's notes")
    assert sorted(sweep.attempts(runs, turn)) == [1, 9, 10, 11]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"status": "well"}'])
def test_a_record_that_cannot_be_read_is_none(tmp_path, launching, text):
    """One of an earlier try costs one more try, and what a launch has left is replaced."""
    turn, runs = turns(tmp_path)[0], tmp_path / "runs"
    (runs / f"{turn.run_name}.1").mkdir(parents=True)
    broken = runs / f"{turn.run_name}.1" / "record.json"
    broken.write_text(text)
    launching("cp", str(broken), "{}/record.json")
    sweep.sweep([turn], runs, 60, None, Listener())
    assert store.load(runs / f"{turn.run_name}.2").status == "failed"


def test_the_newest_step_is_read_from_the_end(tmp_path):
    assert launches.last_step(tmp_path) == {}
    steps = tmp_path / "steps.jsonl"
    steps.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.5}\n{"step": 2, "eval_loss": 0.5}\n{"step": 3')
    assert launches.last_step(tmp_path)["step"] == 2, "half a line is not read"
    steps.write_text(steps.read_text() + ', "loss": 0.25}\n5\n')
    assert launches.last_step(tmp_path) == {"step": 3, "loss": 0.25}


def test_a_rank_without_a_loss_is_shown(tmp_path, monkeypatch, capsys):
    """On a terminal, a virtual one."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    (tmp_path / "steps.jsonl").write_text('{"step": 3, "loss": null, "lr": 0.1}\n')
    with Progress(1) as progress:
        progress.start(turns(tmp_path)[0])
        progress.step(tmp_path, 7.0)
    assert "  step 3  7 s" in capsys.readouterr().out


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
    runs, listener = tmp_path / "runs", Listener()

    def interrupt(*_):
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()  # while it waits for the launch to end
        raise KeyboardInterrupt

    listener.step = interrupt
    with pytest.raises(KeyboardInterrupt):
        sweep.sweep(turns(tmp_path), runs, 60, None, listener)
    assert working_on(runs) == []
    assert list(statuses(runs).values()) == ["killed"]


DEEP = """
import faulthandler, signal, time
def deep(left):
    deep(left - 1) if left else (print('ready', flush=True), time.sleep(60))
faulthandler.register(signal.SIGUSR2)
deep(59)
"""


def test_the_stacks_of_many_ranks_are_told_one_after_the_other(tmp_path, monkeypatch):
    """Written all at once into one file they would be mixed within lines."""
    printed = tmp_path / "output.txt"
    with printed.open("w") as output:
        ranks = [subprocess.Popen([sys.executable, "-c", DEEP], stdout=output, stderr=output) for _ in range(4)]
    while printed.read_text().count("ready") < len(ranks):
        time.sleep(0.05)
    monkeypatch.setattr(launches, "family", lambda *_: [psutil.Process(rank.pid) for rank in ranks])
    launches.ask_where(ranks[0], tmp_path)
    launches.end(ranks[0], tmp_path)
    for rank in ranks:
        rank.wait(timeout=1)  # gone already
    lines = re.findall(r'^  File "<string>", line \d in deep$', printed.read_text(), re.MULTILINE)
    assert len(lines) == 4 * 60
