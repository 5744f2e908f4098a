"""A sweep with so many minutes: what it starts, what it leaves, what it ends, and how it goes on."""

import sys
import time
from dataclasses import replace

import pytest
from shaped import record as shaped
from test_sweep import MINI, Listener, impatient, mini, statuses  # noqa: F401

from study.core import machine
from study.core.errors import Stop
from study.records import store
from study.sweeps import launches, protocol, sweep
from study.sweeps.sweep import BEFORE_THE_RECORD_S, GROWTH, expected_s


def cells(tmp_path, text: str = MINI) -> list:
    return protocol.cells(protocol.read(str(mini(tmp_path, text))), "tiny")


def tried(runs, turn: protocol.Cell, seconds: float, status: str = "done", number: int = 1) -> None:
    """A run folder as a try of so many seconds leaves it."""
    folder = runs / f"{turn.run_name}.{number}"
    folder.mkdir(parents=True)
    at = ("2026-01-01T00:00:00.000+00:00", f"2026-01-01T00:{int(seconds) // 60:02}:{int(seconds) % 60:02}.000+00:00")
    error = None if status == "done" else {"kind": "Test", "message": "m", "where": "w", "what_to_do": "d"}
    times = {"started_utc": at[0], "finished_utc": at[1], "software": machine.versions(), "schema": 2}
    store.write(folder, shaped(run_id=folder.name, status=status, error=error, **times))


def test_a_cell_needs_what_its_longest_try_took_and_a_little_more(tmp_path):
    cell = cells(tmp_path)[0]
    assert expected_s(cell, tmp_path) == 0, "nothing is known, and nothing declared"
    tried(tmp_path, cell, 30)
    tried(tmp_path, replace(cell, repeat=2), 100, "killed")
    assert expected_s(cell, tmp_path) == GROWTH * 100 + BEFORE_THE_RECORD_S
    assert expected_s(cells(tmp_path)[1], tmp_path) == 0, "another cell's tries say nothing"


def test_before_its_first_try_the_protocol_says(tmp_path):
    assert expected_s(cells(tmp_path, MINI + "reserve_s = 90\n")[0], tmp_path) == 90
    assert cells(tmp_path, MINI + "reserve_s = 9\n")[0].name == cells(tmp_path)[0].name, "a budget makes no other cell"


@pytest.mark.parametrize("budget", ["-1", "inf"])
def test_a_budget_that_is_no_time_is_refused(tmp_path, budget):
    with pytest.raises(Stop, match=r"reserve_s.*\(got -1\)" if budget == "-1" else "reserve_s"):
        cells(tmp_path, MINI + f"reserve_s = {budget}\n")


def test_what_cannot_end_in_time_is_left(tmp_path, monkeypatch):
    """Two of three cells have a history: one of a minute, one of half an hour. The window has ten minutes."""
    monkeypatch.setattr(launches, "command", lambda *_: ["true"])
    turns, listener = sweep.plan(cells(tmp_path), 1), Listener()
    tried(tmp_path / "runs", turns[0], 60, "killed")
    tried(tmp_path / "runs", turns[1], 1800, "killed")
    outcomes = sweep.sweep(turns, tmp_path / "runs", 60, None, listener, minutes=10)
    assert [turn.settings["seed"] for turn in listener.started] == [3, 1], "what was never tried comes first"
    assert sorted(outcome.status for outcome in outcomes) == ["failed", "failed", "left"]
    left = next(outcome for outcome in outcomes if outcome.status == "left")
    assert "it needs about 2270 s" in left.reason
    assert len(statuses(tmp_path / "runs")) == 4, "what is left has no new folder"
    without_minutes = Listener()
    sweep.sweep(turns, tmp_path / "runs", 60, None, without_minutes)
    assert turns[1] in without_minutes.started


def test_what_runs_when_the_window_ends_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(launches, "command", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
    turns, started = sweep.plan(cells(tmp_path), 1), time.monotonic()
    outcomes = sweep.sweep(turns, tmp_path / "runs", 60, None, Listener(), minutes=0.5 / 60)
    assert time.monotonic() - started < 15
    assert [outcome.status for outcome in outcomes] == ["killed", "left", "left"]
    assert "the window ended" in outcomes[0].reason
    assert list(statuses(tmp_path / "runs").values()) == ["killed"]


def test_out_of_memory_is_settled(tmp_path, monkeypatch):
    """Under a device's limit the same would happen again: it is not tried in every window."""
    turns, listener = sweep.plan(cells(tmp_path), 1), Listener()
    monkeypatch.setattr(launches, "command", lambda *_: ["true"])
    for turn, status in zip(turns, ("oom", "diverged", "done"), strict=True):
        tried(tmp_path / "runs", turn, 5, status)
    sweep.sweep(turns, tmp_path / "runs", 60, None, listener)
    assert listener.started == [turns[1]]
