"""Faults strike a small real sweep: the right status and sentence, nothing of the user's touched, nothing left, and the
same command completes the work. The table is `faults.py`, the runner `fault_runner.py`.

A few are played here, one of each kind that has its own place in the code; `make faults` plays the whole table.
"""

import shutil
from pathlib import Path

import pytest
from conftest import forked
from faults import FAULTS, MOMENTS, PREPARATIONS, STRIKES

from study.errors import Stop
from study.machine import linux
from study.machine.kernel_log import KernelLog
from study.records import store
from study.sweeps import outcomes

SHORT = (
    "signal: SIGKILL to itself, timed window, rank 1",
    "signal: SIGKILL to the sweep, timed window, rank 1",
    "signal: SIGINT to the sweep, timed window, rank 0",
    "hang: it sleeps, timed window, rank 1",
    "memory: the kernel kills it for memory (cgroup), timed window, rank 1",
    "disk: the disk is full (tmpfs), between windows, rank 0",
    "exception: it leaves with code 0, timed window, rank 1",
)
CAP_SYS_ADMIN = 1 << 21
NEEDS = {"tmpfs": "mount", "bind mount": "mount", "cgroup": "cgroup"}


def may(right: str) -> bool:
    """Whether this machine lets a test mount a file system or make a control group (version 1)."""
    if right == "cgroup":
        group = Path("/sys/fs/cgroup/memory/zero-study-may")
        try:
            group.mkdir(exist_ok=True)
            (group / "memory.limit_in_bytes").read_text()
            group.rmdir()
        except OSError:
            return False
        return True
    return bool(int(linux.fields("/proc/self/status")["CapEff"], 16) & CAP_SYS_ADMIN)


def test_each_fault_costs_one_cell_and_the_same_command_goes_on(shared):
    """All in one process, which imports the libraries once; a fault that this machine lets nobody make is left out."""
    chosen = [fault for fault in FAULTS if fault.name in SHORT]
    names = [f.name for f in chosen if all(may(right) for words, right in NEEDS.items() if words in f.how)]
    base = shared / "faults"
    base.mkdir()
    script, flags = "tests/fault_runner.py", ["--base", str(base), "--jobs", "2", "--exactly", *names]
    run = forked(base, config="accelerate_configs/single.yaml", launcher=(), script=script, flags=flags)
    assert run.code == 0, run.output
    assert [name for name in names if name not in run.output] == [], run.output


def test_the_table_is_whole():
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names)) >= 60
    assert set(SHORT) <= set(names)
    for fault in FAULTS:
        assert fault.how in (PREPARATIONS if fault.when == "before" else STRIKES)
        assert fault.when in (*MOMENTS, "before") or fault.real
    assert {fault.how for fault in FAULTS} >= PREPARATIONS.keys()


# --- how a launch ended, from what launchers and the kernel say ----------------------------------------------------

TORCHRUN = """
============================================================
study/train.py FAILED
------------------------------------------------------------
Failures:
[0]:
  time      : 2026-11-22_02:00:00
  host      : here
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 70)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
------------------------------------------------------------
Root Cause (first observed failure):
[1]:
  time      : 2026-11-22_02:00:00
  host      : here
  rank      : 3 (local_rank: 1)
  exitcode  : -11 (pid: 71) (SIGSEGV)
  error_file: <N/A>
  traceback : Signal 11 (SIGSEGV) received by PID 71
============================================================
"""


@pytest.mark.parametrize(
    ("output", "death"),
    [
        (TORCHRUN, outcomes.RankKilled("SIGSEGV", 3, 71)),
        (TORCHRUN.replace("\n", "\n1: "), outcomes.RankKilled("SIGSEGV", 3, 71)),  # as srun prints it
        (
            "E1122 failed (exitcode: -7) local_rank: 1 (pid: 9) of binary: python",
            outcomes.RankKilled("SIGBUS", None, 9),
        ),
        ("subprocess.CalledProcessError: Command x died with <Signals.SIGABRT: 6>.", outcomes.RankKilled("SIGABRT")),
        ("exitcode  : -99 (pid: 7)", outcomes.RankKilled("signal 99")),
    ],
)
def test_a_launchers_report_names_the_rank_and_the_signal(output, death):
    assert outcomes.reported(output)[0] == death


def test_a_rank_that_torchrun_killed_at_last_is_not_the_first_to_die():
    """It waited for the other one in C++, where it heeds no SIGTERM."""
    late = "Unable to shutdown process 70 via 15, forcefully exiting via 9"
    report = TORCHRUN.replace("exitcode  : 1 (pid: 70)", "exitcode  : -9 (pid: 70)")
    assert outcomes.reported(f"{late}\n{report}") == [outcomes.RankKilled("SIGSEGV", 3, 71)]
    assert outcomes.reported(report) == [outcomes.RankKilled("SIGSEGV", 3, 71), outcomes.RankKilled("SIGKILL", 0, 70)]


def test_a_rank_that_the_kernel_killed_is_named_whoever_survived_and_whatever_it_said():
    """The log has its process id: from torchrun's report, or from the heartbeat that it left."""
    bug = store.ended(store.new("run", []), Stop("ValueError: no such row", "report this"), "ValueError")
    for output, pids in ((TORCHRUN.replace("-11", "-9").replace("SIGSEGV", "SIGKILL"), {}), ("", {71: 3})):
        stop = outcomes.killed(bug, output, 1, outcomes.OomKills(1, frozenset({71})), pids)
        assert (stop.status, stop.where) == ("host_oom", "rank 3")
    stop = outcomes.killed(bug, "", 1, outcomes.OomKills(1, frozenset({555})), {71: 3})
    assert stop is None, "another process of this machine"
    interrupted = store.ended(store.new("run", []), Stop("interrupted", "again", "interrupted"), "KeyboardInterrupt")
    assert outcomes.killed(interrupted, "", 1, outcomes.OomKills(1, frozenset({555})), {71: 3}) is None
    assert outcomes.killed(interrupted, "", 1, outcomes.OomKills(1), {71: 3}).status == "host_oom", (
        "the kernel only counts"
    )


def test_a_rank_that_ended_without_a_word_is_named_by_torchruns_root_cause():
    gone = Stop("another rank ended without an error message", "see", where="another rank")
    record = store.ended(store.new("run", []), gone, "RuntimeError")
    stop = outcomes.killed(record, TORCHRUN.replace("-11", "3"), 1, outcomes.OomKills(0), {})
    assert (stop.what, stop.where) == ("rank 3 ended with exit code 3 and no message", "rank 3")


NO_WORDS = store.new("run", [])
IN_IMPORTS = """Traceback (most recent call last):
  File "study/train.py", line 1, in <module>
    import study
ValueError: no such row
W1122 api.py:1028] Sending process 70 closing signal SIGTERM
Traceback (most recent call last):
  File "accelerate/commands/launch.py", line 1, in main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""


def test_a_rank_that_failed_in_its_imports_is_named_with_its_words_whoever_is_named_first():
    """It had no record to write them to. A rank that torchrun ended is not the cause, wherever it stands."""
    ended = "rank : 0 (local_rank: 0)\nexitcode : -15 (pid: 70)\n"
    failed = "rank : 3 (local_rank: 1)\nexitcode : 1 (pid: 71)\n"
    for report in (ended + failed, failed + ended):  # the root cause stands last
        stop = outcomes.killed(NO_WORDS, IN_IMPORTS + report, 1, outcomes.OomKills(0), {})
        assert (stop.status, stop.where) == ("failed", "rank 3")
        assert stop.what == "rank 3 ended with exit code 1 and no record of why: ValueError: no such row"


def test_a_sentence_that_a_rank_could_only_print_is_the_reason():
    """On a full disk there is no room for the record, but some in the last block of the output."""
    printed = "record.json cannot be written (No space left on device)"
    report = "rank : 3 (local_rank: 1)\nexitcode : 1 (pid: 71)\n"
    stop = outcomes.killed(
        NO_WORDS, f"{printed}. What to do: make room, and start it again.\n{report}", 1, outcomes.OomKills(0), {}
    )
    assert stop.what == f"rank 3 ended with exit code 1 and no record of why: {printed}"


@pytest.mark.parametrize(
    ("output", "code", "who", "where"),
    [
        (TORCHRUN.replace("-11", "-15"), 1, "SIGTERM ended rank 3", "rank 3"),
        ("torch.distributed.elastic.SignalException: Process 9 got signal: 2", 1, "SIGINT ended the launcher", None),
        ("", -15, "SIGTERM ended the launcher", None),
        ("subprocess.CalledProcessError: it died with <Signals.SIGHUP: 1>.", 1, "SIGHUP ended a rank", None),
    ],
)
def test_who_was_told_to_end_before_there_was_a_record_is_interrupted(output, code, who, where):
    stop = outcomes.killed(NO_WORDS, output, code, outcomes.OomKills(0), {})
    assert (stop.status, stop.what, stop.where) == ("interrupted", f"interrupted: {who}", where)


def test_the_kernels_log_is_read_from_now_on(tmp_path):
    before = b"6,1,1,-;Out of memory: Killed process 11 (python) total-vm:9kB\n"
    (tmp_path / "kmsg").write_bytes(before)
    log = KernelLog(tmp_path / "kmsg")
    assert log.killed_for_memory() == set()
    with (tmp_path / "kmsg").open("ab") as file:
        file.write(b"6,2,2,-;Memory cgroup out of memory: Killed process 4711 (pt_main) total-vm:9kB\n")
        file.write(b"6,3,3,-;python[12]: segfault at 0\n")
    assert log.killed_for_memory() == {4711}
    log.close()
    assert KernelLog(tmp_path / "none").killed_for_memory() is None


def test_room_is_reserved_for_a_record_and_freed_with_its_process(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    store.reserve(tmp_path)
    assert list(tmp_path.iterdir()) == [], "the kernel frees what has no name"
    assert shutil.disk_usage(tmp_path).free <= free
    assert store.release_reserved_space(tmp_path)
    assert not store.release_reserved_space(tmp_path)
