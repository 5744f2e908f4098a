"""Which records count as evidence: none with impossible values, and none that is not a record at all."""

import pytest
import shaped
from shaped import changed, failed, finished, put, script

from study.ledger.evidence import OfRuns
from study.records import metrics, runs

IMPOSSIBLE = [
    *((finished, {"loss__train__4": loss}, "but should be above 0") for loss in (0.0, -1.0, 1e308)),
    (finished, {"loss__eval__0__accuracy": 90.0}, "loss.eval.0.accuracy must be at most 1"),
    (script, {"observed__runs__0__losses": [0.0]}, "a loss is 0,"),
    (script, {"observed__runs__2__losses": []}, "observed.runs.2.losses"),
]


@pytest.mark.parametrize(("make", "changes", "words"), IMPOSSIBLE)
def test_a_record_of_impossible_values_is_read_by_nobody(tmp_path, make, changes, words):
    """The report, the verdicts and `study runs --keep` name it, in one way."""
    put(tmp_path / "runs", changed(make(), **changes))
    loaded = shaped.runs(tmp_path / "runs")
    (reason,) = loaded.set_aside
    assert (len(loaded), words in reason) == (0, True), reason
    kept, (left_out,) = runs.keep([tmp_path / "runs"], tmp_path / "machine")
    assert (kept, words in left_out) == (0, True)


def test_a_run_that_failed_may_have_a_loss_that_no_training_keeps(tmp_path):
    error = {"kind": "E", "message": "m", "what_to_do": "w"}
    put(tmp_path, changed(finished(), loss__train__4=1e308, status="diverged", error=error))
    assert len(shaped.runs(tmp_path)) == 1


def test_ranks_that_take_turns_at_being_slow_are_not_slower_for_it():
    """Two ranks, of 0.9 and 1.1 s and then of 1.1 and 0.9: two steps in 2.0 s of wall time, not in 2.2."""
    times = {"time__step_s": [1.1] * 6, "time__window_s": 6.0}
    assert metrics.tokens_per_s(shaped.record(changed(finished(step=1.0), **times))) == 256


def test_out_of_memory_is_an_answer_and_not_a_gap(tmp_path):
    """The record must say why, and no number takes the place of the missing measurement."""
    loaded = shaped.runs(put(tmp_path, failed("known"), failed("silent") | {"error": None}))
    assert [run.record.status for run in loaded.counting] == ["oom"]
    assert "'error' is empty" in loaded.set_aside[0]
    about = {"kind": "runs", "where": {"arm": "zero2"}, "value": 0}
    assert OfRuns(**about, quantity="memory.per_rank.0.host_peak_bytes").computed(loaded.counting) is None
