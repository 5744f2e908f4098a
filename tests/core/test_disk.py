"""The folder to offload to: made where it can be used."""

import pytest

from study.core import machine
from study.core.errors import Stop


def test_a_folder_is_made_by_any_rank(tmp_path):
    folder = tmp_path / "disk/deep"
    for _ in range(2):
        machine.make_swap_folder(folder, needed_bytes=1)
        assert list(folder.iterdir()) == [], "the probe is gone"


def test_a_folder_that_cannot_be_used_is_a_stop(tmp_path):
    """It says how much room there is and how much it takes."""
    with pytest.raises(Stop, match="free, and this run needs 1000000 TB") as caught:
        machine.make_swap_folder(tmp_path, needed_bytes=10**18)
    assert caught.value.status == "unavailable", "another machine may have the room"
    (tmp_path / "file").write_text("precious")
    for folder in (tmp_path / "file", tmp_path / "file/run"):
        with pytest.raises(Stop, match=r"cannot be used for offloading .*(File exists|Not a directory)"):
            machine.make_swap_folder(folder, needed_bytes=1)
    assert (tmp_path / "file").read_text() == "precious"
