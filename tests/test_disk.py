"""The folder to offload to: made when it can be used, swept up when its run is dead, gone when its run ends."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from study.core import machine
from study.core.errors import Stop

MINE = os.getpid()  # this process stands for the launcher
NAME = f"{machine.SWAP_PREFIX}{socket.gethostname()}-{MINE}"


@pytest.fixture
def dead() -> int:
    """The process id of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_folder_is_given_and_emptied(tmp_path):
    base = tmp_path / "disk" / "deep"
    folder = machine.give_swap_folder(base, MINE, needed_bytes=1)
    assert folder == base / NAME
    assert list(base.iterdir()) == [folder], "the probe is gone"
    assert [path.name for path in folder.iterdir()] == [machine.MARKER]
    (folder / "swapped").mkdir()
    (folder / "swapped" / "tensor.swp").write_bytes(b"x" * 10_000)
    for removed in (folder, folder, None):  # twice, and nothing, are no mistake
        machine.remove_swap_folder(removed)
    assert list(base.iterdir()) == [], "nothing of ours stays, and the folder itself may be the user's"


def left_by(base: Path, owner: dict | None, name: str = "left") -> Path:
    """A folder as a killed run leaves it, with this marker."""
    folder = base / f"{machine.SWAP_PREFIX}{name}"
    folder.mkdir()
    (folder / "tensor.swp").write_text("x")
    if owner is not None:
        (folder / machine.MARKER).write_text(json.dumps(owner))
    return folder


def test_what_a_dead_run_left_is_removed(tmp_path, dead):
    """Also where its process id is in use again, and after the machine was started anew."""
    mine = machine._owner(MINE)
    left_by(tmp_path, mine | {"pid": dead}, "dead")
    left_by(tmp_path, mine | {"start_ticks": mine["start_ticks"] - 1}, "used-again")
    left_by(tmp_path, mine | {"boot": "another"}, "before-boot")
    given = machine.give_swap_folder(tmp_path, MINE, needed_bytes=1)
    assert list(tmp_path.iterdir()) == [given]


def test_what_is_not_a_dead_runs_of_this_machine_stays(tmp_path, dead):
    """The user's own folders, whatever their names; those of the living; those of other hosts and containers."""
    gone = machine._owner(MINE) | {"pid": dead}
    left_by(tmp_path, machine._owner(os.getppid()), "living")
    left_by(tmp_path, gone | {"host": "elsewhere"}, "other-host")
    left_by(tmp_path, gone | {"machine": "other"}, "same-name")
    left_by(tmp_path, gone | {"pid_namespace": "pid:[1]"}, "container")
    left_by(tmp_path, {"pid": dead}, "odd")
    left_by(tmp_path, None, "no-marker")
    for name in (f"run-{dead}", "precious"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tensor.swp").write_text("x")
    before = set(tmp_path.rglob("*.swp"))
    machine.give_swap_folder(tmp_path, MINE, needed_bytes=1)
    assert set(tmp_path.rglob("*.swp")) == before


def test_a_folder_of_that_name_that_is_not_ours_is_refused(tmp_path):
    theirs = left_by(tmp_path, None, NAME.removeprefix(machine.SWAP_PREFIX))
    with pytest.raises(Stop, match="not from this run"):
        machine.give_swap_folder(tmp_path, MINE, needed_bytes=1)
    assert [path.name for path in theirs.iterdir()] == ["tensor.swp"]
    assert list(tmp_path.iterdir()) == [theirs]


def test_too_little_room_is_a_stop(tmp_path):
    """It says how much there is and how much it takes, and leaves nothing behind but the folder."""
    base, disk_here = tmp_path / "disk", os.statvfs(tmp_path)
    with pytest.raises(Stop) as caught:
        machine.give_swap_folder(base, MINE, needed_bytes=10**18)
    words = re.fullmatch(rf"--nvme-dir {base} has ([\d.]+) GB free, and this run needs 1000000 TB", str(caught.value))
    assert float(words[1]) == pytest.approx(disk_here.f_bavail * disk_here.f_frsize / 1e9, rel=0.05)
    assert caught.value.status == "unavailable", "another machine may have the room"
    assert "--nvme-dir" in caught.value.remedy
    assert list(tmp_path.rglob("*")) == [base]


def refused(base) -> str:
    with pytest.raises(Stop, match=rf"--nvme-dir {base} cannot be used for offloading \(.+\)") as caught:
        machine.give_swap_folder(base, MINE, needed_bytes=1)
    assert "you may write to" in caught.value.remedy
    return str(caught.value)


def test_a_path_that_is_a_file_is_a_stop(tmp_path):
    file = tmp_path / "file"
    file.write_text("precious")
    assert "File exists" in refused(file)
    assert "Not a directory" in refused(file / "below")
    assert file.read_text() == "precious"
