"""Which processes take part, which launcher started them, and how one that ends gives the reason."""

import os
import re
import signal
import sys
import threading
import time
import types

import psutil
import pytest
import torch
from safetensors import SafetensorError

from study.core.errors import Stop
from study.measure import hardware
from study.records import store
from study.training import ending, main
from study.training.ending import fail, reason
from study.training.launch import Launch, find_launch
from tests.conftest import ranks_of


def test_the_two_that_stay_find_each_other(tmp_path):
    """Four real processes, of which two leave: the group of the others has two members and works."""
    code = """
        import os, torch, torch.distributed as dist
        from study.core.arms import FOLDER, read
        from study.training.launch import Launch, shrink_group
        shrink_group(read(FOLDER / "zero2.yaml"), Launch(1, 0.0, "x", None))
        dist.init_process_group("gloo")
        ones = torch.ones(1)
        dist.all_reduce(ones)
        print(f"rank {dist.get_rank()} counts {int(ones.item())}", flush=True)
        dist.destroy_process_group()
        os._exit(0)
    """
    ranks = ranks_of(code, tmp_path, ranks=4)
    assert ranks.code == 0, ranks.output
    lines = re.findall(r"rank \d counts \d", ranks.output)  # two processes may write into one line
    assert sorted(lines) == ["rank 0 counts 2", "rank 1 counts 2"]


# --- memory --------------------------------------------------------------------------------------------------------


# The message of an error, or none of a MemoryError; free bytes of the device, as a power of two; and what is full. Host
# memory that cannot be pinned has the message of a full device.
FULL = """
CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate` | 36 | device
                                                                   | 36 | host
[enforce fail] DefaultCPUAllocator: can't allocate memory          | 36 | host
CUDA error: out of memory                                          | 36 | host
CUDA error: out of memory                                          | 20 | device, host
"""


@pytest.mark.parametrize("case", FULL.strip("\n").splitlines())
def test_whose_memory_is_full(case, monkeypatch):
    message, free, full = (cell.strip() for cell in case.split("|"))
    error = RuntimeError(message) if message else MemoryError()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 ** int(free), 2**37))
    assert [hardware.device_is_full(error), hardware.host_is_full(error)] == ["device" in full, "host" in full]


# --- the launcher --------------------------------------------------------------------------------------------------

AFTER = "--config_file a.yaml --num_processes 3 study/train.py --steps 8"


def launch_under(monkeypatch, *lines: str) -> Launch:
    """Return what train.py finds below processes with these command lines, the nearest first."""
    parents = [
        types.SimpleNamespace(pid=pid, cmdline=line.split, create_time=lambda: 5.0)
        for pid, line in enumerate(lines, start=7)
    ]
    monkeypatch.setattr(psutil, "Process", lambda *_: types.SimpleNamespace(parents=lambda: parents))
    monkeypatch.setattr(sys, "argv", ["/repo/study/train.py", "--steps", "8"])
    return find_launch()


@pytest.mark.parametrize(
    "line",
    [
        f"/bin/python /bin/accelerate launch {AFTER}",
        "accelerate launch --config-file=a.yaml --num-processes=3 /repo/study/train.py",
    ],
)
def test_every_spelling_of_the_launcher_is_recognised(line, monkeypatch):
    far = "accelerate launch --config_file far.yaml study/train.py"
    assert launch_under(monkeypatch, "timeout 60 something else", line, far).__dict__.items() >= (
        {"pid": 8, "started": 5.0, "config_file": "a.yaml", "num_processes": "3"}.items()
    )


@pytest.mark.parametrize("line", ["--config_file a.yaml other.py", "study/train.py --config_file a.yaml"])
def test_without_a_config_file_it_says_what_to_type(line, monkeypatch):
    with pytest.raises(Stop, match="--config_file") as caught:
        launch_under(monkeypatch, f"accelerate launch {line}")
    assert "accelerate launch --config_file accelerate_configs/single.yaml study/train.py" in caught.value.remedy


# --- the reason ----------------------------------------------------------------------------------------------------

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:8092. GLHF!"
READ = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Read error [127.0.0.1]:21: Connection reset by peer"
FULL_DISK = "/dev/full"  # the kernel's: each write fails as on a full disk


def error_of(call) -> Exception:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


ERRORS = {
    "lost": RuntimeError(GLOO),
    "reset": RuntimeError(READ),
    "ended": KeyboardInterrupt("SIGTERM"),
    "Ctrl-C": KeyboardInterrupt("SIGINT"),
    "disk": OSError(28, "No space left", "/runs/a"),
    "bug": ValueError("no such row"),
    "cut": error_of(lambda: torch.save(torch.zeros(10_000), FULL_DISK)),
    "cut2": SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
}
# The error, ranks of the launch, those that are dead, how many the kernel killed; the status, where, and words.
# Alone there is no other rank. torchrun ends the others by SIGTERM. So does somebody who ends the launcher, but then
# all ranks are alive.
REASONS = """
lost   | 2 |   | 0 | failed | another rank | another rank ended without an error message
reset  | 2 | 1 | 0 | failed | rank 1       | rank 1 ended without an error message
lost   | 2 | 1 | 1 | oom    | rank 1       | the kernel killed rank 1
lost   | 1 |   | 0 | failed |              | RuntimeError:
ended  | 2 | 1 | 0 | failed | rank 1       | rank 1 ended without an error message
ended  | 2 | 1 | 1 | oom    | rank 1       | the kernel killed rank 1
ended  | 2 |   | 1 | killed |              | interrupted
Ctrl-C | 2 |   | 0 | killed |              | interrupted
disk   | 2 |   | 0 | failed |              | /runs/a cannot be written or opened
cut    | 2 |   | 0 | failed |              | a file could not be written whole
cut2   | 2 |   | 0 | failed |              | a file could not be written whole
bug    | 2 |   | 0 | failed |              | ValueError: no such row
"""


@pytest.mark.parametrize("case", REASONS.strip().splitlines())
def test_why_a_rank_ends(case, tmp_path, monkeypatch):
    error, ranks, dead, kills, status, where, words = (cell.strip() for cell in case.split("|"))
    monkeypatch.setenv("WORLD_SIZE", ranks)
    monkeypatch.setattr(ending, "ranks_that_died", lambda *_: dict.fromkeys(map(int, dead.split())))
    monkeypatch.setattr(ending, "oom_kills", lambda: 3 + int(kills))
    stop = reason(ERRORS[error], Launch(1, 0.0, "x", None, 3), tmp_path)
    assert (stop.status, stop.where or "") == (status, where)
    assert stop.what.startswith(words)


# --- the end -------------------------------------------------------------------------------------------------------

NO_MODEL = Stop("no such model", "give another")
SENTENCE = "failed: no such model. What to do: give another.\n"


@pytest.fixture
def handlers():
    """The handlers that `fail` takes away, given back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def folder(tmp_path):
    """A run folder with a record that says 'running'."""
    store.write(tmp_path, store.new("run", []))
    return tmp_path


@pytest.mark.parametrize("words", ["--help", "--steps x"])
def test_the_first_rank_alone_prints_help_or_a_mistake(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
    monkeypatch.setattr(ending, "LINGER_S", 0)
    printed = []
    for rank in (0, 1):
        with pytest.raises(SystemExit):
            main.read_flags(find_launch, rank)  # whose module has a docstring
        printed.append("".join(capsys.readouterr()))
    assert "--steps" in printed[0]
    assert printed[1] == ""


# In seconds: when this launch begins, the record is there, and rank 1 is told to end; then its status, and who speaks.
# It waits for the record that rank 0 makes. If rank 0 is silent, it speaks itself, unless torchrun ends it: then rank 0
# has failed as well, and spoken. A record from before the launch is of another run here, which rank 0 refuses.
ENDS = """
no model | 0   | 0   |     | failed  | rank 1
no model | 0   | 0.2 |     | failed  | rank 1
no model | 0   | 1.5 |     | running | rank 1
no model | 0   | 1.5 | 0.2 | running | rank 0
no model | 120 | 0   | 0.2 | running | rank 0
Ctrl-C   | 0   | 0   |     | running | rank 0
"""


@pytest.mark.parametrize("case", ENDS.strip().splitlines())
def test_what_rank_1_leaves_and_says(case, handlers, tmp_path, monkeypatch, capsys):
    error, begun_s, record_after_s, told_after_s, status, speaks = (cell.strip() for cell in case.split("|"))
    monkeypatch.setattr(ending, "LINGER_S", 0.8)
    record = store.new("run", [])
    writing = threading.Timer(float(record_after_s), store.write, (tmp_path, record))
    writing.start()
    if record_after_s == "0":
        writing.join()
    if told_after_s:
        threading.Timer(float(told_after_s), os.kill, (os.getpid(), signal.SIGTERM)).start()
    fail(tmp_path, 1, ERRORS.get(error, NO_MODEL), Launch(1, time.time() + float(begun_s), "x", None))
    said = capsys.readouterr().out
    writing.join()
    assert (store.load(tmp_path).status, said) == (status, SENTENCE if speaks == "rank 1" else "")


def test_a_run_that_gets_two_signals_ends_once(tmp_path):
    """Launchers send two: the second SIGTERM comes during the clean-up after the first."""
    code = """
        import os, signal
        from study.training import ending
        ending.interrupt_on_signals(os.getppid())
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.sigtimedwait([], 5)
        except KeyboardInterrupt as error:
            os.kill(os.getpid(), signal.SIGTERM)
            ending.fail(ending.NO_FOLDER, 0, error)
    """
    output = ranks_of(code, tmp_path, ranks=1).output
    assert "Traceback" not in output
    assert "killed: interrupted" in output


def test_a_rank_that_waits_in_native_code_ends_when_told(folder):
    """Python's handlers do not run there: torchrun would kill it after 30 s, and the record would say nothing."""
    code = f"""
        import ctypes, functools, os, signal, threading
        from pathlib import Path
        from study.measure.heartbeat import Heartbeat
        from study.training import ending
        from study.training.launch import Launch
        ending.UNRESPONSIVE_S, folder = 0.5, Path({str(folder)!r})
        ending.interrupt_on_signals(os.getppid())
        Heartbeat(folder, 0, functools.partial(ending.end_if_unresponsive, folder, 0, Launch(1, 0.0, "x", None)))
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        mutex, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)
    """
    run = ranks_of(code, folder, ranks=1)
    assert (run.code, run.output.count("killed: interrupted. What to do: start it again.")) == (1, 1), run.output
    assert run.seconds < 10
    assert store.load(folder).status == "killed"


def test_a_run_under_a_cap_that_leaves_nothing_still_says_why(folder):
    code = f"""
        from pathlib import Path
        from study.core import machine
        from study.training import ending
        machine.cap_private_memory(1024)
        try:
            bytearray(10**9)
        except BaseException as error:
            ending.fail(Path({str(folder)!r}), 0, error)
    """
    assert "oom: the host refused more memory" in ranks_of(code, folder, ranks=1).output
    assert store.load(folder).status == "oom"
