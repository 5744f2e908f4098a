"""Two sweeps share a device: each has its cells, one trains at a time, and waiting for the device is nobody's time."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from study.core import machine
from study.core.errors import Stop
from study.records import store
from study.sweeps import protocol, sweep
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


# --- a window, as a machine without a network has it ------------------------------------------------------------------


@pytest.fixture
def window(monkeypatch, tmp_path):
    """The script, with its folders elsewhere, and a pack that lacks nothing here."""
    spec = importlib.util.spec_from_file_location("gpu_windows", ROOT / "windows/gpu_windows.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name in ("SITE", "COMPILED", "LOCK"):
        monkeypatch.setattr(script, name, tmp_path / "gpu" / name.lower())
    pack = tmp_path / "pack"
    pack.mkdir()
    python = ".".join(map(str, sys.version_info[:2]))
    (pack / "pack.json").write_text(json.dumps({"python": python, "deepspeed": "0.0", "commit": "0"}))
    monkeypatch.setattr(sys, "argv", ["gpu_windows.py", "--pack", str(pack), "run", "--scale", "tiny"])
    return script


@pytest.mark.parametrize("name", ["guelph", "as_printed"])
def test_one_gpu_needs_no_pack_and_takes_one(name, window):
    """With a network the data comes from the hub; without one, from what was packed, and nothing else changes."""
    folders = {"data": "gpu-pack/data/imdb", "tokenizer": "gpu-pack/models/bert-large-uncased"}
    cells = protocol.cells(protocol.read(name), "one_gpu")
    packed = [cell.settings | folders if cell.settings.get("data") == "hub" else cell.settings for cell in cells]
    assert [window.packed(cell, Path("gpu-pack")).settings for cell in cells] == packed
    assert packed != [cell.settings for cell in cells]


@pytest.mark.slow
def test_two_cells_of_a_window_have_the_device_one_after_the_other(window, tmp_path, capfd):
    lines = [f"{name} = {json.dumps(value)}" for name, value in PART.items() if value != {}]
    about = 'about = "two cells"\ndocument = "none"\nreplicates = "nothing"\n[[part]]\n'
    (tmp_path / "two.toml").write_text(about + "\n".join(lines).replace("[1, 2, 3]", "[1, 2]") + "\n[part.tiny]\n")
    sys.argv += ["--minutes", "8", "--runs", str(tmp_path / "runs"), str(tmp_path / "two.toml")]
    with pytest.raises(SystemExit) as end:
        window.main()
    said = capfd.readouterr().out
    assert end.value.code == 0, said
    records = [store.load(path) for path in (tmp_path / "runs/two").glob("p-*")]
    assert [record.status for record in records] == ["done", "done"]
    first, second = sorted(records, key=lambda record: record.started_utc)
    assert first.finished_utc < second.started_utc, "the second waited"
    lines = [line for line in said.splitlines() if line.startswith("[1/1] single")]
    assert ["done" in line for line in lines] == [False, False, True, True], "both had begun before one had ended"
    assert second.wall_s < 1.5 * first.wall_s + 5, "the wait is not in its time"


def test_the_tests_come_first_and_share_the_device_and_what_compiles_is_kept(window, tmp_path, monkeypatch):
    called = []

    def call(words, ends, **more):
        called.append((Path(words[0]).name, words[1], more))
        folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu_adam.so").write_text("compiled")
        return 0

    monkeypatch.setattr(window, "call", call)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    sys.argv += ["--tests", "10", "smoke"]
    with pytest.raises(SystemExit) as end:
        window.main()
    assert end.value.code == 0
    shared = {"STUDY_DEVICE_LOCK": str(window.LOCK)}
    lane = ("gpu_windows.py", "--pack", shared)
    assert called == [("-m", "study.cli", {}), ("-m", "pytest", {}), lane, lane]
    with tarfile.open(tmp_path / "pack/compiled.tar.gz") as archive:
        assert any(name.endswith("cpu_adam.so") for name in archive.getnames())
    # --- on a machine that begins empty
    shutil.rmtree(tmp_path / "gpu")
    monkeypatch.setattr(window, "call", lambda *_, **__: 0)
    with pytest.raises(SystemExit):
        window.main()
    assert len([*(tmp_path / "gpu").rglob("cpu_adam.so")]) == 1
