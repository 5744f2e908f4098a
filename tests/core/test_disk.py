"""The folder to offload to: made when it can be used, and swept up when its run is dead."""

import os
import subprocess
import sys

import pytest

from study.core import machine
from study.core.errors import Stop

MINE = os.getpid()  # this process stands for the launcher


def test_a_folder_is_given_once(tmp_path):
    base = tmp_path / "disk/deep"
    folder = machine.give_swap_folder(base, MINE, needed_bytes=1)
    assert machine.give_swap_folder(base, MINE, needed_bytes=1) == folder, "another rank gets the same"
    assert list(base.iterdir()) == [folder], "the probe is gone"


def test_of_other_folders_only_those_of_dead_runs_of_this_machine_are_removed(tmp_path):
    """Those of the living stay, the user's own, and those of other hosts and containers, which cannot be judged."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    dead, parent = process.pid, os.getppid()
    given = machine.give_swap_folder(tmp_path, MINE, needed_bytes=1)
    ours = given.name.removesuffix(f"-{MINE}-{machine.start_ticks(MINE)}")
    kept = {f"{ours}-{parent}-{machine.start_ticks(parent)}", f"{ours}-mine", f"run-{dead}-1", given.name}
    kept |= {f"{machine.SWAP_PREFIX}elsewhere-1-2-{dead}-1"}
    gone = {f"{ours}-{dead}-1", f"{ours}-{MINE}-1"}  # the second process id is in use again
    for name in kept | gone:
        (tmp_path / name).mkdir(exist_ok=True)
    machine.give_swap_folder(tmp_path, MINE, needed_bytes=1)
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_a_folder_that_cannot_be_used_is_a_stop(tmp_path):
    """It says how much room there is and how much it takes."""
    with pytest.raises(Stop, match="free, and this run needs 1000000 TB") as caught:
        machine.give_swap_folder(tmp_path, MINE, needed_bytes=10**18)
    assert caught.value.status == "unavailable", "another machine may have the room"
    (tmp_path / "file").write_text("precious")
    with pytest.raises(Stop, match=r"cannot be used for offloading .*(File exists|Not a directory)"):
        machine.give_swap_folder(tmp_path / "file", MINE, needed_bytes=1)
    assert (tmp_path / "file").read_text() == "precious"
