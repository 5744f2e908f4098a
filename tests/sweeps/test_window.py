"""A sweep with so many minutes: what it starts, what it leaves, what it ends, and how it goes on."""

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from study.core import machine
from study.records import store
from study.sweeps.protocol import Cell
from study.sweeps.sweep import BEFORE_THE_RECORD_S, GROWTH, expected_s
from tests.shaped import record as shaped
from tests.sweeps.test_sweep import Listener, impatient, launching, statuses, swept, turns  # noqa: F401


def tried(runs: Path, turn: Cell, seconds: int, status: str = "done") -> None:
    """A run folder as a try of so many seconds leaves it."""
    folder = runs / f"{turn.run_name}.1"
    folder.mkdir(parents=True)
    at = ("2026-01-01T00:00:00.000+00:00", f"2026-01-01T00:{seconds // 60:02}:{seconds % 60:02}.000+00:00")
    error = None if status == "done" else {"kind": "Test", "message": "m", "where": "w", "what_to_do": "d"}
    times = {"started_utc": at[0], "finished_utc": at[1], "software": machine.versions(), "schema": 2}
    store.write(folder, shaped(run_id=folder.name, status=status, error=error, **times))


def test_a_cell_needs_what_its_longest_try_took_and_a_little_more(tmp_path):
    cell, other, _ = turns(reserve_s=90)
    assert turns()[0].name == cell.name, "a budget makes no other cell"
    assert expected_s(turns()[0], tmp_path) == 0, "nothing is known, and nothing declared"
    assert expected_s(cell, tmp_path) == 90, "before its first try the protocol says"
    tried(tmp_path, cell, 30)
    tried(tmp_path, replace(cell, repeat=2), 100, "killed")
    assert expected_s(cell, tmp_path) == GROWTH * 100 + BEFORE_THE_RECORD_S
    assert expected_s(other, tmp_path) == 90, "another cell's tries say nothing"


def test_what_cannot_end_in_time_is_left(tmp_path, launching):  # noqa: F811
    """Two of three cells have a history: one of a minute, one of half an hour. The window has ten minutes."""
    launching("true")
    cells, listener = turns(), Listener()
    tried(tmp_path, cells[0], 60, "killed")
    tried(tmp_path, cells[1], 1800, "killed")
    outcomes = swept(cells, tmp_path, listener, minutes=10)
    assert [turn.settings["seed"] for turn in listener.started] == [3, 1], "what was never tried comes first"
    assert [outcome.status for outcome in outcomes] == ["failed", "failed", "left"]
    assert "it needs about 2270 s" in outcomes[2].reason
    assert len(statuses(tmp_path)) == 4, "what is left has no new folder"
    swept(cells, tmp_path, without_minutes := Listener())
    assert cells[1] in without_minutes.started


@pytest.mark.parametrize(
    ("limits", "statuses_", "words"),
    [
        ({"minutes": 0.5 / 60}, ["killed", "left", "left"], "the window ended"),
        ({"timeout_s": 0.5}, ["timeout"] * 3, "it wrote nothing for 0 s"),
    ],
)
def test_what_runs_when_its_time_is_up_is_ended(limits, statuses_, words, tmp_path, launching):  # noqa: F811
    launching(sys.executable, "-c", "import time; time.sleep(60)")
    started = time.monotonic()
    outcomes = swept(turns(), tmp_path, **limits)
    assert time.monotonic() - started < 15
    assert [outcome.status for outcome in outcomes] == statuses_
    assert words in outcomes[0].reason
    assert {*statuses(tmp_path).values()} == {statuses_[0]}


STEPS = "import sys, time; [(time.sleep(0.2), open(sys.argv[1] + '/steps.jsonl', 'a').write('{}')) for _ in range(15)]"
LINES = "import time; [(time.sleep(0.2), print(flush=True)) for _ in range(15)]"  # the published script writes no steps


@pytest.mark.parametrize(
    ("code", "status"), [(STEPS, "failed"), (LINES, "failed"), (f"{STEPS}; time.sleep(60)", "timeout")]
)
def test_the_limit_is_of_silence_and_not_of_a_run(code, status, tmp_path, launching):  # noqa: F811
    """A launch of three seconds that writes all the time outlives a limit of two. One that then hangs does not."""
    launching(sys.executable, "-c", code, "{}")
    started = time.monotonic()
    (outcome,) = swept(turns()[:1], tmp_path, timeout_s=2)
    assert outcome.status == status, "failed: it ended by itself, without a record"
    assert 3 < time.monotonic() - started < 15


def test_out_of_memory_is_settled(tmp_path, launching):  # noqa: F811
    """Under a device's limit the same would happen again: it is not tried in every window."""
    launching("true")
    cells, listener = turns(), Listener()
    for cell, status in zip(cells, ("oom", "diverged", "done"), strict=True):
        tried(tmp_path, cell, 5, status)
    swept(cells, tmp_path, listener)
    assert listener.started == [cells[1]]
