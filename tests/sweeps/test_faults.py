"""Faults strike a rank of a real sweep, and what launchers and the kernel say of how a launch ended."""

from pathlib import Path

import pytest

from study.core.errors import Stop
from study.records import store
from study.records.schema import Record
from study.records.sections import Requested
from study.sweeps import launches, outcomes, protocol
from tests.conftest import ROOT, fork_server, table
from tests.shaped import record as shaped
from tests.sweeps.test_sweep import LATE, swept, turns, working_on

real_command = launches.command


def forked_command(*cell: object) -> list[str]:
    """The words that have the launch of a cell forked. What torchrun prints of a dead rank is lacking there."""
    python, _, _, *words = real_command(*cell)
    return [python, str(ROOT / "tests/forkclient.py"), fork_server()[1:], *words]


@pytest.fixture
def struck(tmp_path, monkeypatch, cache):
    """A function that sweeps one cell whose trainer is struck by a fault, and returns the record of its newest try."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setitem(protocol.SCRIPTS, "train", ROOT / "tests/dying.py")
    small = {"sequence": 16, "train_rows": 64, "micro_batch": 4, "steps": 4, "warmup_steps": 1, "threads": 1}

    def sweep_one(fault: str = "", rank: int = 1, forked: bool = False, **settings) -> Record:
        monkeypatch.setattr(launches, "command", forked_command if forked else real_command)
        (cell,) = turns(arm="ddp", ranks=2, seed=1, **small | settings)
        monkeypatch.setenv("FAULT", f"{fault} study.train optimizer_step 3 {rank}" if fault else "")
        runs = tmp_path / "runs"
        swept([cell], runs)
        assert working_on(runs) == []
        record = store.load(max(runs.glob(f"{cell.run_name}.*")))
        assert "Traceback" not in str(record.error)
        return record

    return sweep_one


def assert_struck(record: Record, words: str) -> None:
    """The rank that the fault struck is the reason."""
    assert (record.status, record.error.where) == ("failed", "rank 1")
    assert words in record.error.message


def test_an_exception_of_a_rank_is_the_reason(struck):
    assert_struck(struck("exception", forked=True), "no such row")


def test_a_cell_that_was_killed_continues_in_the_next_sweep(struck):
    """Its record has the losses that it wrote, and those of the next one begin with them."""
    killed = struck("SIGKILL", save_every=2)
    assert_struck(killed, "was killed (SIGKILL; not for lack of memory)")
    assert len(killed.loss.train) == 2
    again = struck(save_every=2, forked=True)
    assert again.status == "done", again.error
    assert again.checkpoints == {"resumes": [{"run_id": killed.run_id, "step": 2}]}
    assert (again.loss.train[:2], len(again.loss.train)) == (killed.loss.train, 4)


def test_a_hang_ends_at_the_time_limit_and_names_the_rank_that_is_missing(struck, tmp_path, monkeypatch):
    """The limit begins when a rank is hanging: how long a launch takes to start is not its matter."""
    hangs = tmp_path / "runs/hangs"
    monkeypatch.setattr(launches, "out_of_time", lambda *_: LATE if hangs.exists() else None)
    record = struck("hang")
    assert record.status == "timeout"
    assert "rank 1 at dying.py:" in record.error.message


# --- how a launch ended, from what launchers and the kernel say ----------------------------------------------------

TORCHRUN = """
==============================
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
==============================
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


LEFT = table("sweeps/left.toml")
OUTPUTS = LEFT["outputs"] | {
    "torchrun 9": TORCHRUN.replace("-11", "-9").replace("SIGSEGV", "SIGKILL"),
    "torchrun 15": TORCHRUN.replace("-11", "-15"),
    "torchrun 143": TORCHRUN.replace("-11", "143"),
    "torchrun exit 3": TORCHRUN.replace("-11", "3"),
    # gloo ends a rank in C++, and the others lose it
    "mismatch": LEFT["mismatch"] + TORCHRUN.replace("-11", "-6"),
}
# The status and the error that the trainer left, what the launcher printed, its exit code, how many processes the
# kernel killed for memory; and then the status, where it was, and words of the reason.
ENDS = """
running | bug  | torchrun 9      | 1   | 1 | oom    | rank 3 | the kernel killed rank 3
killed  | bug  | torchrun 9      | 1   | 1 | oom    | rank 3 | the kernel killed rank 3
failed  | bug  | torchrun 9      | 1   | 1 | oom    | rank 3 | the kernel killed rank 3
failed  | none | received 9      | 1   | 1 | oom    |        | the kernel killed
failed  | none | died with 9     | 1   | 1 | oom    |        | the kernel killed
running | none | nothing         | 1   | 1 | oom    |        | the kernel killed
failed  | gloo | nothing         | 1   | 1 | oom    |        | the kernel killed
killed  | none | received 9      | 1   | 0 | failed |        | not for lack of memory
killed  | none | received 9      | 1   | ? | failed |        | does not say
failed  | killed | torchrun 9    | 1   | 1 | oom    | rank 3 | the kernel killed rank 3
failed  | killed | torchrun 9    | 1   | 0 | failed | rank 3 | was killed (SIGKILL; not for lack of memory)
failed  | killed | nothing       | 1   | 0 | failed | rank 3 | rank 3 was killed by SIGKILL
failed  | gone | torchrun exit 3 | 1   | 0 | failed | rank 3 | exit code 3 and no record of why:
running | none | in imports      | 1   | 0 | failed | rank 3 | exit code 1 and no record of why: ValueError: no such row
running | none | full disk       | 1   | 0 | failed | rank 3 | exit code 1 and no record of why: record.json cannot be
running | none | torchrun 15     | 1   | 0 | killed | rank 3 | rank 3 ended with SIGTERM
running | none | torchrun 143    | 1   | 0 | killed | rank 3 | rank 3 ended with SIGTERM
failed  | gloo | mismatch        | 1   | 0 | failed | rank 3 | rank 3 was ended
running | none | got 2           | 1   | 0 | killed |        | a process of the launch ended with SIGINT
running | none | nothing         | -15 | 0 | killed |        | a process of the launch ended with SIGTERM
"""


def left(folder: Path, status: str, output: str = "", kind="Stop", message="its own", where="rank 0") -> bytes:
    """A run folder as a launch leaves it. Returns its record.json."""
    folder.mkdir()
    (folder / "output.txt").write_text(output)
    record = store.new(folder.name, []).model_copy(update={"requested": Requested(arm="ddp")})
    if status == "done":
        record = shaped(run_id=folder.name)
    elif status != "running":
        record = store.ended(record, Stop(message, "what to do", status, where), kind)
    store.write(folder, record)
    (folder / ".7f.part").touch()  # of a writer that was killed
    return (folder / "record.json").read_bytes()


@pytest.mark.parametrize("case", ENDS.strip().splitlines())
def test_how_a_launch_ended(case, tmp_path):
    before, error, output, code, kills, status, where, words = (cell.strip() for cell in case.split("|"))
    left(tmp_path / "run", before, OUTPUTS[output], **LEFT["errors"][error])
    record = outcomes.outcome(turns()[0], tmp_path / "run", int(code), None, None if kills == "?" else int(kills))
    assert (record.status, record.error.where or "") == (status, where)
    assert words in record.error.message
    assert store.load(tmp_path / "run") == record
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["output.txt", "record.json"]


@pytest.mark.parametrize("status", ["running", "killed", "failed"])
def test_what_is_ended_says_why(status, tmp_path):
    left(tmp_path / "run", status)
    assert outcomes.outcome(turns()[0], tmp_path / "run", 1, LATE, 0).error.message == LATE.what


# The kernel's count is the machine's: a run that tells a reason of its own keeps it.
STAYS = [(each, "none", LATE, 0) for each in outcomes.ANSWERS]
STAYS += [("failed", "bug", None, 1), ("failed", "hub", None, 1), ("killed", "none", None, 0)]


@pytest.mark.parametrize(("status", "error", "stop", "kills"), STAYS)
def test_what_a_run_has_found_out_stays(status, error, stop, kills, tmp_path):
    written = left(tmp_path / "run", status, **LEFT["errors"][error])
    assert outcomes.outcome(turns()[0], tmp_path / "run", 1, stop, kills).status == status
    assert (tmp_path / "run/record.json").read_bytes() == written
