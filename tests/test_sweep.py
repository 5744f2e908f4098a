"""Sweeps of real launches: resumed, held by one, ended cleanly; and every outcome is a row."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT

from study import protocol, record, sweep
from study.record import Stop

MINI = """about = "three quick cells, of which the second fails"
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


def mini(tmp_path: Path, text: str = MINI) -> Path:
    (tmp_path / "mini.toml").write_text(text)
    return tmp_path / "mini.toml"


def study(*words, cache: Path, **options) -> subprocess.Popen:
    command = [Path(sys.executable).with_name("study"), *words]
    return subprocess.Popen(
        [str(w) for w in command], cwd=ROOT, env=os.environ | {"XDG_CACHE_HOME": str(cache)}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options,
    )  # fmt: skip


def finish(process: subprocess.Popen, timeout: float = 300) -> str:
    with process:
        output, _ = process.communicate(timeout=timeout)
    return output


def statuses(runs: Path) -> dict[str, str]:
    return {path.parent.name: json.loads(path.read_text())["status"] for path in runs.glob("*/record.json")}


def working_on(runs: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and str(runs) in " ".join(process.info["cmdline"] or []):
            found.append(process)
    return found


def test_repeats_go_there_and_back(tmp_path):
    cells = protocol.cells(protocol.read(str(mini(tmp_path))), "tiny")
    turns = sweep.plan(cells, 3)
    assert [turn.repeat for turn in turns] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [turn.cell.asked["seed"] for turn in turns] == [1, 2, 3, 3, 2, 1, 1, 2, 3]


def test_filters_choose(tmp_path):
    cells = protocol.cells(protocol.read("smoke"), "tiny")
    assert {cell.arm for cell in sweep.chosen(cells, ("arm=zero3*", "task=imdb"))} == {
        "zero3", "zero3_cpu", "zero3_nvme",
    }  # fmt: skip
    assert sweep.chosen(cells, ("seed=42",)) == cells, "a setting that the protocol leaves at its default"
    with pytest.raises(Stop, match="is no filter"):
        sweep.chosen(cells, ("colour=red",))


def test_what_a_machine_cannot_run_is_a_row(tmp_path):
    cells = protocol.cells(protocol.read("smoke"), "one_gpu")
    stop = sweep.why_not(cells[0], gpus=0)
    assert stop.status == "unavailable"
    made = sweep.not_run(sweep.Turn(cells[0], 1), tmp_path, stop)
    assert record.load(tmp_path / f"{cells[0].name}-r1.0") == made
    assert "needs a GPU" in made["error"]["message"]
    assert sweep.why_not(cells[0], gpus=1) is None


def test_a_sweep_runs_goes_on_and_is_not_done_twice(tmp_path, cache):
    """The second of three cells fails (its loss explodes); the third runs all the same. Then: nothing is run again."""
    text = MINI.replace("seed = [1, 2, 3]", "lr = [1e-3, 1e38, 1e-4]")
    words = ("sweep", mini(tmp_path, text), "--runs", tmp_path / "runs")
    first = finish(study(*words, cache=cache))
    assert sorted(statuses(tmp_path / "runs").values()) == ["diverged", "done", "done"], first
    assert "2 done, 1 diverged" in first
    before = {path: path.read_bytes() for path in (tmp_path / "runs").glob("*/record.json")}
    started = time.monotonic()
    second = finish(study(*words, "--only", "lr=0.00*", cache=cache))
    assert time.monotonic() - started < 6
    assert second.count("done before") == 2
    assert {path: path.read_bytes() for path in (tmp_path / "runs").glob("*/record.json")} == before


def test_a_killed_sweep_leaves_no_process_and_is_taken_up_again(tmp_path, cache):
    runs = tmp_path / "runs"
    words = ("sweep", mini(tmp_path), "--runs", runs)
    first = study(*words, cache=cache)
    while list(statuses(runs).values()).count("done") < 1 or "running" not in statuses(runs).values():
        assert first.poll() is None, first.stdout.read()
        time.sleep(0.2)
    done = {name: (runs / name / "record.json").read_bytes() for name, s in statuses(runs).items() if s == "done"}
    first.send_signal(signal.SIGKILL)
    finish(first)
    psutil.wait_procs(working_on(runs), timeout=30)
    assert working_on(runs) == []
    second = finish(study(*words, cache=cache))
    after = statuses(runs)
    assert list(after.values()).count("done") == 3, second
    assert len(after) == 4, "the run that was cut off keeps its folder, and has a second one"
    for name, content in done.items():
        assert (runs / name / "record.json").read_bytes() == content, "what was done is not done again"


def test_the_sweep_itself_costs_next_to_nothing(tmp_path, monkeypatch):
    """Five cells whose launch does nothing but end: what is left is the sweep's own."""
    monkeypatch.setattr(sweep, "command", lambda *_: ["true"])
    cells = protocol.cells(protocol.read(str(mini(tmp_path, MINI.replace("[1, 2, 3]", "[1, 2, 3, 4, 5]")))), "tiny")
    told = []

    class Tell:
        def __getattr__(self, name):
            return lambda *args: told.append(name)

    started = time.monotonic()
    made = sweep.sweep(sweep.plan(cells, 1), tmp_path / "runs", 60, None, Tell())
    per_cell_s = (time.monotonic() - started) / len(cells)
    assert [one["status"] for one in made] == ["failed"] * 5, "nothing was run, and that is no success"
    assert told.count("start") == 5
    assert per_cell_s < 0.5


def test_two_sweeps_do_not_share_a_folder(tmp_path, cache):
    runs = tmp_path / "runs"
    with sweep.held(runs):
        output = finish(study("sweep", mini(tmp_path), "--runs", runs, cache=cache))
    assert f"process {os.getpid()}" in output
    assert "Traceback" not in output
    assert statuses(runs) == {}


def test_ctrl_c_ends_the_launch_too(tmp_path, cache):
    """Started as in the background, where SIGINT is ignored at first."""
    runs = tmp_path / "runs"
    text = MINI.replace("steps = 6", "epochs = 900")

    def in_the_background():
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    process = study("sweep", mini(tmp_path, text), "--runs", runs, cache=cache, preexec_fn=in_the_background)
    while not list(runs.glob("*/steps.jsonl")):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert "start it again" in output
    assert "Traceback" not in output
    assert working_on(runs) == []
    assert list(statuses(runs).values()) == ["interrupted"]


def test_a_run_that_takes_too_long_is_ended_with_its_stacks(tmp_path, cache):
    text = (
        MINI.replace("steps = 6", "epochs = 900").replace("seed = [1, 2, 3]", "seed = 1").replace('"single"', '"ddp"')
    )
    for seconds in (20, 90):  # a machine with much else to do is not yet training after the first
        runs = tmp_path / f"runs-{seconds}"
        output = finish(study("sweep", mini(tmp_path, text), "--runs", runs, "--timeout-s", str(seconds), cache=cache))
        assert list(statuses(runs).values()) == ["timeout"], output
        if list(runs.glob("*/steps.jsonl")):
            break
    told = next(runs.glob("*/output.txt")).read_text()
    stood = re.findall(r'train\.py", line \d+ in train\b', told)  # in a step, or between two windows of steps
    assert len(stood) == 2, "where both ranks stood"
    assert working_on(runs) == []


def test_the_stacks_of_many_ranks_are_told_one_after_the_other(tmp_path):
    """Written all at once into one file they would be mixed within lines."""
    code = (
        "import faulthandler, signal, time\n"
        "def deep(left):\n"
        "    deep(left - 1) if left else (print('ready', flush=True), time.sleep(60))\n"
        "faulthandler.register(signal.SIGUSR2)\n"
        "deep(59)\n"
    )
    told = tmp_path / "output.txt"
    with told.open("w") as output:
        ranks = [subprocess.Popen([sys.executable, "-c", code], stdout=output, stderr=output) for _ in range(4)]
    while told.read_text().count("ready") < len(ranks):
        time.sleep(0.05)
    sweep.end(ranks[0], [psutil.Process(rank.pid) for rank in ranks], stacks=True)
    for rank in ranks:
        rank.wait(timeout=1)  # gone already
    lines = re.findall(r'^  File "<string>", line \d in deep$', told.read_text(), re.MULTILINE)
    assert len(lines) == 4 * 60


@pytest.fixture
def small_memory():
    """A control group of 1.4 GB, in which the kernel kills what grows beyond it."""
    group = Path("/sys/fs/cgroup/memory") / f"zero-study-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(1_400_000_000))
    except OSError as error:
        pytest.skip(f"capping memory needs the right to make a control group (version 1): {error}")
    yield group
    for process in (group / "cgroup.procs").read_text().split():
        os.kill(int(process), signal.SIGKILL)
    time.sleep(0.5)
    group.rmdir()


def test_what_needs_more_memory_than_there_is_is_a_row(tmp_path, cache, small_memory):
    """The kernel kills BERT-base; the record says so, and the next cell is run."""
    runs = tmp_path / "runs"
    text = MINI.replace("seed = [1, 2, 3]", 'model = ["bert-base", "bert-tiny"]\nsequence = 32')

    def enter():
        (small_memory / "cgroup.procs").write_text(str(os.getpid()))

    output = finish(study("sweep", mini(tmp_path, text), "--runs", runs, cache=cache, preexec_fn=enter))
    assert sorted(statuses(runs).values()) == ["done", "host_oom"], output
    told = next(made for made in map(record.load, runs.glob("p-*")) if made["status"] == "host_oom")
    assert "the kernel killed a rank" in told["error"]["message"]
    assert told["requested"]["model"] == "bert-base"
