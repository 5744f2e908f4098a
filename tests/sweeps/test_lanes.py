"""Two sweeps share a device: each has its cells, one trains at a time, and waiting for the device is nobody's time."""

import subprocess
import sys

import pytest

from study.core import machine
from study.core.errors import Stop
from study.sweeps import sweep
from study.sweeps.sweep import expected_s
from tests.conftest import ROOT
from tests.sweeps.test_sweep import PART, Listener, impatient, launching, statuses, swept, turns  # noqa: F401

TAKES = f"import os, sys; sys.path.insert(0, {str(ROOT)!r}); from study.core import machine"
TAKES += "; machine.take_device(os.environ[machine.DEVICE_LOCK])"


@pytest.fixture
def lock(monkeypatch, tmp_path):
    monkeypatch.setenv(machine.DEVICE_LOCK, str(tmp_path / "device"))


def taking(code: str = "input()") -> subprocess.Popen:
    words = [sys.executable, "-c", f"{TAKES}; print(flush=True); {code}"]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_process_has_the_device_until_it_ends(lock):
    with taking() as first:
        assert first.stdout.readline(), "nobody else has it"
        with taking("pass") as second:
            with pytest.raises(subprocess.TimeoutExpired):
                second.wait(3)
            first.kill()  # however it ends
            assert second.wait(30) == 0


def test_each_cell_is_in_one_lane(tmp_path, launching):  # noqa: F811
    launching("true")
    listeners = [Listener(), Listener()]
    with sweep.lock_runs_folder(tmp_path, (1, 2)), pytest.raises(Stop, match="holds"):
        swept(turns(), tmp_path, lane=(1, 2))
    for number, listener in enumerate(listeners, 1):
        swept(sweep.plan(turns(), 1, (number, 2)), tmp_path, listener, lane=(number, 2))
    assert [[turn.settings["seed"] for turn in listener.started] for listener in listeners] == [[1, 3], [2]]
    for lane in ((0, 2), (3, 2)):
        with pytest.raises(Stop, match="is none"):
            sweep.plan(turns(), 1, lane)


@pytest.mark.parametrize(("shares", "status"), [(False, "timeout"), (True, "killed")])
def test_waiting_for_the_device_is_no_time_of_a_cell(shares, status, tmp_path, launching, request):  # noqa: F811
    """Without a record a launch may still wait: it has no time limit but the window's, and says nothing of its time."""
    if shares:
        request.getfixturevalue("lock")
    launching(sys.executable, "-c", "import time; time.sleep(60)")
    cells = turns(reserve_s=1)[:1]
    (outcome,) = swept(cells, tmp_path, timeout_s=1, minutes=4 / 60)
    assert outcome.status == status
    assert expected_s(cells[0], tmp_path) == 1, "as before its first try"


def test_a_record_ends_the_wait(tmp_path, launching, lock):  # noqa: F811
    """From its record on a cell has the device, and its time counts."""
    code = "import pathlib, time; pathlib.Path('{}', 'record.json').write_text('half'); time.sleep(60)"
    launching(sys.executable, "-c", code)
    (outcome,) = swept(turns()[:1], tmp_path, timeout_s=1, minutes=1)
    assert outcome.status == "timeout"
