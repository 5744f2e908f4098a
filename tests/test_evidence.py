"""Which records count as evidence: none with impossible values, and none that is not a record at all."""

import pytest
import shaped
from shaped import changed, failed, finished, put, script

from study.ledger.evidence import OfRuns
from study.records import keeping, metrics
from study.records.keeping import ON_DEVICE, refuse_impossible

GPU = {"gpu": True, "model": "gpt2", "sequence": 1024, "step": 0.2}
DEVICE = "memory__per_rank__0__"
SCRIPT = {"script": "as published"}
IMPOSSIBLE = [
    *(({}, {"loss__train__4": loss}, f"a loss is {loss:g}") for loss in (0.0, -1.0, 1e308)),
    ({}, {"loss__eval__0__eval_loss": 0.0}, "a loss is 0"),
    ({}, {"loss__eval__0__accuracy": 90.0}, "the accuracy is 90"),
    ({}, {f"{DEVICE}host_peak_bytes": 10**12}, "rank 0: host_peak_bytes is more than there is"),
    *((GPU, {f"{DEVICE}{name}": 2 * 10**11}, f"rank 0: {name} is more than there is") for name in ON_DEVICE),
    (SCRIPT, {"observed__runs": []}, "no training is recorded"),
    (SCRIPT, {"observed__runs__1__steps": 0}, "training 2 took no step"),
    (SCRIPT, {"observed__runs__2__losses": []}, "training 3 took no step"),
    (SCRIPT, {"observed__runs__0__training_s": 0}, "training 1 took no step, no time"),
]


@pytest.mark.parametrize(("how", "changes", "words"), IMPOSSIBLE)
def test_a_record_of_impossible_values_is_read_by_nobody(tmp_path, how, changes, words):
    """The report, the verdicts and `study runs --keep` name it, in one way. A run that failed may have such values."""
    fields = script(**changes) if how is SCRIPT else changed(finished(**how), **changes)
    put(tmp_path / "runs", fields)
    loaded = shaped.runs(tmp_path / "runs")
    (reason,) = loaded.set_aside
    assert (len(loaded), words in reason) == (0, True), reason
    kept, (left_out,) = keeping.keep([tmp_path / "runs"], tmp_path / "machine")
    assert (kept, words in left_out) == (0, True)
    error = {"kind": "E", "message": "m", "what_to_do": "w"}
    refuse_impossible(tmp_path, shaped.record(fields | {"status": "failed", "error": error}))


def test_what_is_not_a_record_at_all_is_set_aside(tmp_path):
    put(tmp_path, changed(finished("run"), schema=0))
    (reason,) = shaped.runs(tmp_path).set_aside
    assert "is not a valid record" in reason


def test_ranks_that_take_turns_at_being_slow_are_not_slower_for_it():
    """Two ranks, of 0.9 and 1.1 s and then of 1.1 and 0.9: two steps in 2.0 s of wall time, not in 2.2."""
    times = {"time__step_s": [1.1] * 6, "time__window_s": 6.0, "energy__steps": 6}
    assert metrics.tokens_per_s(shaped.record(changed(finished(step=1.0), **times))) == 256


def test_out_of_memory_is_an_answer_and_not_a_gap(tmp_path):
    """The record must say why, and no number takes the place of the missing measurement."""
    loaded = shaped.runs(put(tmp_path, failed("known"), failed("silent") | {"error": None}))
    assert [run.record.status for run in loaded.counting] == ["oom"]
    assert "'error' is empty" in loaded.set_aside[0]
    about = {"kind": "runs", "where": {"arm": "zero2"}, "value": 0}
    assert OfRuns(**about, quantity="memory.per_rank.0.host_peak_bytes").computed(loaded.counting) is None
