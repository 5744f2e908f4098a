"""Which processes take part, which launcher started them, and how one that ends gives the reason."""

import os
import re
import signal
import sys
import threading
import time
import types
from unittest import mock

import psutil
import pytest
import torch
from conftest import ranks_of

from study.core.errors import Stop
from study.measure import hardware
from study.records import store
from study.training import ending
from study.training.ending import fail, reason
from study.training.launch import Launch, find_launch, ranks_alive


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


@pytest.mark.parametrize(
    ("error", "free_bytes", "device", "host"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), 2**36, True, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), 2**36, True, False),
        (MemoryError(), 2**36, False, True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 2**36, False, True),
        (RuntimeError("shapes do not match"), 2**36, False, False),
        (RuntimeError("CUDA error: out of memory"), 2**36, False, True),  # host memory that cannot be pinned
        (RuntimeError("CUDA error: out of memory"), 2**20, True, True),  # the same message for a full device
    ],
)
def test_whose_memory_is_full(error, free_bytes, device, host, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_bytes, 2**37))
    assert hardware.device_is_full(error) is device
    assert hardware.host_is_full(error) is host


# --- the launcher --------------------------------------------------------------------------------------------------

AFTER = "--config_file a.yaml --num_processes 3 study/train.py --steps 8"


def under(monkeypatch, *lines: str) -> None:
    """This process is made to run train.py below processes with these command lines, the nearest first."""
    parents = [
        types.SimpleNamespace(pid=pid, cmdline=line.split, create_time=lambda: 5.0)
        for pid, line in enumerate(lines, start=7)
    ]
    monkeypatch.setattr(psutil, "Process", lambda *_: types.SimpleNamespace(parents=lambda: parents))
    monkeypatch.setattr(sys, "argv", ["/repo/study/train.py", "--steps", "8"])


@pytest.mark.parametrize(
    "line",
    [
        f"/bin/python /bin/accelerate launch {AFTER}",
        f"python -u -m accelerate.commands.accelerate_cli launch {AFTER}",
        "accelerate launch --config-file=a.yaml --num-processes=3 /repo/study/train.py",
    ],
)
def test_every_spelling_of_the_launcher_is_recognised(line, monkeypatch):
    under(monkeypatch, "timeout 60 something else", line, "accelerate launch --config_file far.yaml study/train.py")
    launch = find_launch()
    assert (launch.pid, launch.started, launch.config_file, launch.num_processes) == (8, 5.0, "a.yaml", 3)


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --nproc_per_node 2 study/train.py",
        "accelerate launch --config_file a.yaml other.py",
        "accelerate launch study/train.py --config_file a.yaml",
    ],
)
def test_without_a_config_file_it_says_what_to_type(line, monkeypatch):
    under(monkeypatch, line)
    with pytest.raises(Stop, match="--config_file") as caught:
        find_launch()
    assert "accelerate launch --config_file accelerate_configs/single.yaml study/train.py" in caught.value.remedy


def test_ranks_are_the_processes_that_run_the_same_script(monkeypatch):
    """One that has ended is not counted, and neither is another program."""

    def process(pid: int, *words: str) -> mock.Mock:
        return mock.Mock(pid=pid, cmdline=lambda: list(words))

    rank = ("python", "study/train.py")
    gone = mock.Mock(pid=10, cmdline=mock.Mock(side_effect=psutil.NoSuchProcess(10)))
    family = [process(os.getpid(), *rank), process(7, *rank), process(8), process(9, "python", "other.py"), gone]
    parent = mock.Mock(children=lambda: family)
    monkeypatch.setattr(psutil, "Process", lambda pid=None: parent if pid == os.getppid() else family[0])
    assert ranks_alive() == 2


# --- the reason ----------------------------------------------------------------------------------------------------

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:8092. GLHF!"
READ = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Read error [127.0.0.1]:21: Connection reset by peer"


@pytest.mark.parametrize("message", [GLOO, READ])
def test_a_lost_connection_is_another_ranks_death(message, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(ending, "ranks_alive", lambda: 1)
    stop = reason(RuntimeError(message))
    assert (stop.status, stop.where, stop.what) == (
        "failed",
        "another rank",
        "another rank ended without an error message",
    )
    assert "report" not in stop.remedy
    monkeypatch.setattr(ending, "oom_kills", lambda: 4)
    for kills_before, status in ((4, "failed"), (3, "oom")):
        stop = reason(RuntimeError(message), Launch(1, 0.0, "x", None, kills_before))
        assert (stop.status, stop.where) == (status, "another rank")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "report this" in reason(RuntimeError(message)).remedy, "alone there is no other rank"


@pytest.mark.parametrize(
    ("number", "alive", "status"),
    [("SIGTERM", 2, "killed"), ("SIGINT", 1, "killed"), ("SIGTERM", 1, "failed")],
)
def test_ended_by_torchrun_because_another_rank_is_gone(number, alive, status, monkeypatch):
    """torchrun ends the others by SIGTERM. So does somebody who ends the launcher, but then all ranks are alive."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(ending, "ranks_alive", lambda: alive)
    assert reason(KeyboardInterrupt(number)).status == status


def test_where_the_launcher_is_gone_all_ranks_are_ended_and_none_is_another_ones_victim(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(ending, "ranks_alive", lambda: 1)
    monkeypatch.setattr(ending, "_parents", [os.getppid() + 1])
    assert reason(KeyboardInterrupt("SIGTERM")).status == "killed"
    assert reason(RuntimeError(GLOO)).status == "killed"


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


def test_a_rank_that_fails_before_there_is_a_record_says_so_itself(handlers, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ending, "LINGER_S", 0.3)
    fail(tmp_path / "none", 1, NO_MODEL)
    assert capsys.readouterr().out == SENTENCE


def test_a_rank_is_silent_when_rank_0_has_failed_as_well(handlers, tmp_path, capsys):
    """Then torchrun ends it. When it is ended before it fails, rank 0 has spoken too."""
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    fail(tmp_path / "none", 1, NO_MODEL)
    fail(None, 1, KeyboardInterrupt("SIGTERM"))
    assert capsys.readouterr().out == ""


def test_a_rank_waits_for_the_record_that_rank_0_makes(handlers, tmp_path, capsys):
    threading.Timer(0.5, store.write, (tmp_path, store.new("run", []))).start()
    fail(tmp_path, 1, NO_MODEL)
    assert capsys.readouterr().out == SENTENCE
    assert store.load(tmp_path).error.where == "rank 1"


def test_the_record_of_another_launch_is_left_alone(handlers, folder, monkeypatch, capsys):
    """Another run is at work in this folder: rank 0 has refused it, and this rank was ended."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(ending, "ranks_alive", lambda: 1)
    fail(folder, 1, KeyboardInterrupt("SIGTERM"), Launch(1, time.time() + 60, "x", None))
    assert store.load(folder).status == "running"
    assert capsys.readouterr().out == ""


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
            ending.fail(None, 0, error)
    """
    output = ranks_of(code, tmp_path, ranks=1).output
    assert "Traceback" not in output
    assert "killed: interrupted" in output


def test_a_rank_that_waits_in_native_code_ends_when_told(folder):
    """Python's handlers do not run there: torchrun would kill it after 30 s, and the record would say nothing."""
    code = f"""
        import ctypes, functools, os, signal, threading
        from pathlib import Path
        from study.measure.collectives import Heartbeat
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


def test_a_run_that_is_given_no_more_memory_at_all_still_says_why(folder):
    """Under a limit that it may not lift (ulimit -v), with nothing left."""
    code = f"""
        import os, resource
        from pathlib import Path
        from study.training import ending
        ending.interrupt_on_signals(os.getppid())
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + 2**23, now + 2**23))
        hoard = []
        try:
            while True:
                hoard.append(bytearray(2**15))
        except BaseException as error:
            ending.fail(Path({str(folder)!r}), 0, error)
    """
    output = ranks_of(code, folder, ranks=1).output
    assert "oom: the host refused more memory" in output, output
    assert store.load(folder).status == "oom"
