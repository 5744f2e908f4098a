"""Faults strike a rank of a real sweep, and what launchers and the kernel say of how a launch ended."""

import subprocess

import pytest
from conftest import ROOT
from test_sweep import Listener, mini, working_on

from study.core.errors import Stop
from study.records import store
from study.records.schema import Record
from study.sweeps import outcomes, protocol, sweep

ONE_CELL = """about = "a cell for a fault"
document = "none"
replicates = "nothing"
[[part]]
name = "p"
arm = "ddp"
ranks = 2
data = "embedded"
init = "random"
sequence = 16
train_rows = 64
eval_rows = 16
micro_batch = 4
steps = 4
warmup_steps = 1
threads = 1
instruments = false
[part.tiny]
"""


@pytest.fixture
def struck(tmp_path, monkeypatch, cache):
    """A function that sweeps one cell whose trainer is struck by a fault, and returns its record."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))

    def sweep_one(fault: str, timeout_s: float = 300) -> Record:
        monkeypatch.setitem(protocol.SCRIPTS, "train", ROOT / "tests" / "sweeps" / "dying.py")
        monkeypatch.setenv("FAULT", fault)
        (turn,) = sweep.plan(protocol.cells(protocol.read(str(mini(tmp_path, ONE_CELL))), "tiny"), 1)
        runs = tmp_path / "runs"
        sweep.sweep([turn], runs, timeout_s, None, Listener())
        assert working_on(runs) == []
        record = store.load(runs / f"{turn.run_name}.1")
        assert record.error is None or "Traceback" not in record.error.message
        return record

    return sweep_one


@pytest.mark.parametrize(
    ("fault", "status", "where", "words"),
    [
        ("exception", "failed", "rank 1", "no such row"),
        ("SIGKILL", "failed", "rank 1", "was killed (SIGKILL; not for lack of memory)"),
        ("out of memory", "oom", "rank 1", "refused more memory"),  # not a failure of the trainer
    ],
)
def test_the_rank_that_a_fault_strikes_is_the_reason(fault, status, where, words, struck):
    record = struck(fault)
    assert (record.status, record.error.where) == (status, where)
    assert words in record.error.message


def test_a_hang_ends_at_the_time_limit_and_names_the_rank_that_is_missing(struck):
    record = struck("hang", timeout_s=40)
    assert record.status == "timeout"
    assert "rank 1 at dying.py:" in record.error.message


def test_on_a_full_disk_there_is_room_for_the_record(struck, tmp_path):
    """Of a small file system, which only root can mount."""
    runs = tmp_path / "runs"
    runs.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(runs)], check=False)
    if mounted.returncode:
        pytest.skip("this user cannot mount a file system")
    try:
        assert struck("full disk").status == "done"
        assert (runs / "large").stat().st_size > 2**20, "the user's file stays"
    finally:
        subprocess.run(["umount", "-l", str(runs)], check=True)


# --- how a launch ended, from what launchers and the kernel say ----------------------------------------------------

RULE = "=" * 60
TORCHRUN = f"""
{RULE}
study/train.py FAILED
Failures:
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 70)
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
Root Cause (first observed failure):
[1]:
  rank      : 3 (local_rank: 1)
  exitcode  : -11 (pid: 71) (SIGSEGV)
  traceback : Signal 11 (SIGSEGV) received by PID 71
{RULE}
"""
ONE = outcomes.Ended("exit code 1", "rank 0")
SEGV = outcomes.Ended("SIGSEGV", "rank 3")
FORCED = TORCHRUN.replace("exitcode  : 1 (pid: 70)", "exitcode  : -9 (pid: 70)")
REPORTS = [
    (TORCHRUN, [SEGV, ONE]),
    (TORCHRUN.replace("\n", "\n1: "), [SEGV, ONE]),  # as srun prints it
    ("subprocess.CalledProcessError: x died with <Signals.SIGABRT: 6>.", [outcomes.Ended("SIGABRT")]),
    (FORCED, [SEGV, outcomes.Ended("SIGKILL", "rank 0")]),
    # torchrun killed rank 0 at last: it waited for the other one in C++, where it heeds no SIGTERM
    (f"Unable to shutdown process 70 via 15, forcefully exiting via 9\n{FORCED}", [SEGV]),
]


@pytest.mark.parametrize(("output", "deaths"), REPORTS)
def test_a_launchers_report_names_the_rank_and_the_signal(output, deaths):
    assert outcomes.reported(output) == deaths


def record_of(what: str, status: str = "failed", where: str | None = None, error: str = "RuntimeError") -> Record:
    return store.ended(store.new("run", []), Stop(what, "see", status, where=where), error)


NO_RECORD = store.new("run", [])
BUG = record_of("ValueError: no such row", error="ValueError")
GONE = record_of("another rank ended without an error message", where="another rank")
IN_IMPORTS = """Traceback (most recent call last):
  File "study/train.py", line 1, in <module>
    import study
ValueError: no such row
W1122 api.py:1028] Sending process 70 closing signal SIGTERM
Traceback (most recent call last):
  File "accelerate/commands/launch.py", line 1, in main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
PRINTED = "record.json cannot be written (No space left on device). What to do: make room, and start it again.\n"
TERMINATED = "rank : 0 (local_rank: 0)\nexitcode : -15 (pid: 70)\n"
FAILED = "rank : 3 (local_rank: 1)\nexitcode : 1 (pid: 71)\n"
SIGKILLED = TORCHRUN.replace("-11", "-9").replace("SIGSEGV", "SIGKILL")
TERMINATED_3 = TORCHRUN.replace("-11", "-15")
SIGNALLED = "torch.distributed.elastic.SignalException: Process 9 got signal: 2"
NO_REASON = "rank 3 ended with exit code 1 and no record of why: "
NO_ROW = f"{NO_REASON}ValueError: no such row"
NO_SPACE = f"{NO_REASON}record.json cannot be written (No space left on device)"
# fmt: off
ENDS = [  # record, output, exit code, killed by the kernel; status, words, rank
    (BUG, SIGKILLED, 1, 1, "oom", None, "rank 3"),
    (GONE, TORCHRUN.replace("-11", "3"), 1, 0, "failed", "exit code 3 and no record of why: ", "rank 3"),
    # In its imports it had no record to write to. A rank that torchrun ended is not the cause, wherever it stands.
    (NO_RECORD, IN_IMPORTS + TERMINATED + FAILED, 1, 0, "failed", NO_ROW, "rank 3"),
    # On a full disk there is no room for the record, but some in the last block of the output.
    (NO_RECORD, PRINTED + FAILED, 1, 0, "failed", NO_SPACE, "rank 3"),
    (NO_RECORD, TERMINATED_3, 1, 0, "killed", "rank 3 ended with SIGTERM", "rank 3"),
    (NO_RECORD, SIGNALLED, 1, 0, "killed", "a process of the launch ended with SIGINT", None),
    (NO_RECORD, "", -15, 0, "killed", "a process of the launch ended with SIGTERM", None),
]
# fmt: on


@pytest.mark.parametrize(("record", "output", "code", "kills", "status", "what", "where"), ENDS)
def test_how_a_launch_ended(record, output, code, kills, status, what, where):
    stop = outcomes.why_it_ended(record, output, code, kills)
    assert (stop and stop.status, stop and stop.where) == (status, where)
    assert what is None or what in stop.what


def test_room_is_reserved_for_a_record_and_freed(tmp_path):
    store.reserve(tmp_path)
    assert list(tmp_path.iterdir()) == [], "the kernel frees what has no name"
    assert store.release_reserved_space(tmp_path)
    assert not store.release_reserved_space(tmp_path)
