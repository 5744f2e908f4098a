"""When a rank's log of its collectives is written: on a clock and a ring that a test sets."""

from types import SimpleNamespace

import pytest

from study.measure import heartbeat
from study.measure.heartbeat import MOVING_S, STILL_S, CollectiveLog
from study.records import collectives
from study.records.collectives import RankLog

ENDED = {"process_group": ["0", "default_pg"], "is_p2p": False, "input_sizes": [[4, 4]], "collective_seq_id": 1}
ENDED |= {"profiling_name": "gloo:all_reduce", "state": "completed", "retired": True}


class Rank:
    """A rank whose collectives and clock are set by hand. Its thread never looks by itself."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.begun = 0
        self.now_s = 1000.0
        monkeypatch.setattr(heartbeat, "_ring", self.ring)
        monkeypatch.setattr(heartbeat.time, "monotonic", lambda: self.now_s)
        self.log = CollectiveLog(folder, rank=0, every_s=1e6)

    def ring(self, with_entries: bool = False) -> dict:
        ring = {"pg_status": {"0": {"last_enqueued_collective": str(self.begun)}}}
        return ring | {"entries": [ENDED] * self.begun} if with_entries else ring

    def look(self, after_s: float, begun: int = 0) -> RankLog | None:
        """What is in the file after a look, which is taken so much later and after so many more collectives."""
        self.now_s += after_s
        self.begun += begun
        self.log.file.unlink(missing_ok=True)
        self.log.look()
        logs = collectives.load(self.folder)
        return logs[0] if logs else None


@pytest.fixture
def rank(tmp_path, monkeypatch):
    rank = Rank(tmp_path, monkeypatch)
    yield rank
    rank.log.close()


def test_a_rank_whose_collectives_stand_writes_where_it_is_once(rank):
    assert rank.look(0, begun=1).recent == [], "while collectives begin, the ring is not copied"
    assert rank.look(STILL_S - 1) is None
    stands = rank.look(1)
    assert stands.still_s == STILL_S
    assert [entry.kind for entry in stands.recent] == ["all_reduce"]
    assert stands.place
    assert rank.look(60) is None, "it is written already"


def test_a_rank_that_goes_on_says_so_at_once_after_it_stood_and_else_now_and_then(rank):
    assert rank.look(0, begun=1).place is None
    assert rank.look(1, begun=1) is None, "a moment ago it said the same"
    assert rank.look(MOVING_S, begun=1)
    assert rank.look(STILL_S).place
    goes_on = rank.look(1, begun=1)
    assert (goes_on.place, goes_on.recent) == (None, [])


def test_numbers_that_change_are_no_standstill(rank):
    rank.look(0, begun=1)
    for _ in range(5):
        seen = rank.look(STILL_S - 1, begun=1)
        assert not (seen and seen.place)


def test_where_a_rank_is_is_the_line_of_its_script_and_not_of_a_library():
    def frame(file: str) -> SimpleNamespace:
        return SimpleNamespace(f_code=SimpleNamespace(co_filename=file, co_name="step"))

    library, script = frame("/env/lib/site-packages/torch/optim/adam.py"), frame("/work/train.py")
    assert heartbeat._place([(library, 7), (script, 12)]) == "train.py:12 in step"
    assert heartbeat._place([(library, 7)]) == "adam.py:7 in step", "better than nothing"
