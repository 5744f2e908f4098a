"""Checkpoints on the disk: a good one is never lost to one that is not whole, and the last good one is found."""

import errno
import os
import resource
import signal
import time

import pytest

from study.core.errors import Stop
from study.records import checkpoints

CONTENT = {"pytorch_model/zero_0.pt": b"a" * 70_000, "pytorch_model/zero_1.pt": b"b" * 70_000, "random.pkl": b"c"}
POINTS = 20
CUT_OFF = "step-00000008: it was cut off while it was written"


def write(run, step: int, pause_s: float = 0.0) -> None:
    part = checkpoints.part_of(run, step)
    for name, content in CONTENT.items():
        (part / name).parent.mkdir(parents=True, exist_ok=True)
        with (part / name).open("wb") as file:
            for start in range(0, len(content), 7_000):
                file.write(content[start : start + 7_000])
                file.flush()
                time.sleep(pause_s)


def sealed(run, *steps: int):
    for step in steps:
        write(run, step)
        checkpoints.seal(checkpoints.part_of(run, step))
    return checkpoints.last_good(run)


def test_a_sealed_one_is_found_with_the_bytes_that_it_has_and_the_last_two_are_kept(tmp_path):
    assert checkpoints.last_good(tmp_path) == (None, [])
    write(tmp_path, 4)
    path, size_bytes = checkpoints.seal(checkpoints.part_of(tmp_path, 4))
    assert checkpoints.last_good(tmp_path) == (path, [])
    assert size_bytes == sum(map(len, CONTENT.values()))
    sealed(tmp_path, 8, 12)
    checkpoints.forget_old(tmp_path)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000008", "step-00000012"]


ZERO_1 = "pytorch_model/zero_1.pt"
SPOILED = f"{ZERO_1} is gone, or not as it was sealed"
DAMAGES = {  # what was done to a checkpoint, and the reason that is given
    "gone": (lambda path: (path / ZERO_1).unlink(), SPOILED),
    "cut": (lambda path: os.truncate(path / ZERO_1, 100), SPOILED),
    "changed": (lambda path: (path / ZERO_1).write_bytes(b"b" * 69_999 + b"x"), SPOILED),
    "unnamed": (
        lambda path: (path / "manifest.json").unlink(),
        "'{}/manifest.json' cannot be read (No such file or directory)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_spoiled_one_is_passed_over_with_the_reason(damage, tmp_path):
    spoil, reason = DAMAGES[damage]
    newest, _ = sealed(tmp_path, 4, 8)
    spoil(newest)
    path, passed_over = checkpoints.last_good(tmp_path)
    assert path.name == "step-00000004"
    assert passed_over == [f"step-00000008: {reason.format(newest)}"]


def test_killed_at_each_of_20_points_while_it_writes_the_one_before_stays(tmp_path):
    """A process is killed after so many twentieths of the time that a checkpoint takes; the ends are among them."""
    started = time.monotonic()
    write(tmp_path / "timed", 4, pause_s=0.001)
    checkpoints.seal(checkpoints.part_of(tmp_path / "timed", 4))
    takes_s, reached = time.monotonic() - started, []
    for point in range(POINTS):
        run = tmp_path / str(point)
        before, _ = sealed(run, 4)
        pid = os.fork()
        if pid == 0:
            write(run, 8, pause_s=0.001)
            checkpoints.seal(checkpoints.part_of(run, 8))
            os._exit(0)
        if point < POINTS - 1:
            time.sleep(takes_s * point / (POINTS - 2))
        else:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # on a busy machine it takes longer than it took before
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        path, passed_over = checkpoints.last_good(run)
        if path == before:
            left = (run / "checkpoints" / "step-00000008.part").exists()
            assert passed_over == [CUT_OFF] * left
        reached.append(path.name)
        assert checkpoints.why_not_whole(before) is None
    assert set(reached) == {"step-00000004", "step-00000008"}, "some points are before the end, and some after it"


def test_a_full_disk_leaves_the_one_before(tmp_path):
    """The kernel refuses the last bytes of a file, as it does when a disk is full."""
    before, _ = sealed(tmp_path, 4)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            write(tmp_path, 8)
        except OSError as error:
            os._exit(error.errno)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == errno.EFBIG
    assert checkpoints.last_good(tmp_path) == (before, [CUT_OFF])


def test_progress_that_cannot_be_read_is_one_sentence(tmp_path):
    path, _ = sealed(tmp_path, 4)
    with pytest.raises(Stop, match=r"progress\.json. cannot be read"):
        checkpoints.read_progress(path)
