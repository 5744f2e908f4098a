"""Faults of real instruments, planted one at a time in a correct record: the audit names each.

Those with a number are faults of published benchmarks. If a record cannot have one, because it does not keep the
number, the comparison of runs must catch it. In `test_checks` are a part of a step (4), scaling without a run on a
single rank (7), and arms of unlike states (8) or batches (9).
"""

import functools
import json
from types import SimpleNamespace

import pytest
import shaped
from pydantic import ValidationError
from shaped import changed, failed, finished, put, script
from test_parity import CAST

from study.cli import keep
from study.ledger import files, ledger, record_checks
from study.ledger.verdict import MEASURED
from study.records import audit, evidence, metrics
from study.records.impossible import ON_DEVICE, impossible

ENGINE_PASSES = "observed__deepspeed__gradient_accumulation_steps"
VIRTUAL = {"virtual": True, "ranks": 8}
GPU = {"gpu": True, "model": "gpt2", "sequence": 1024, "step": 0.2}
DEVICE = "memory__per_rank__0__"
PART = "memory__components__per_rank__0__"
SCRIPT = {"script": "as published"}
SAVED = {"bytes": 4_387_000, "parameters": 1_096_578, "dtypes": ["float32"]}


def faults(fields: dict, reached: float | None = None) -> list[str]:
    return audit.faults(shaped.record(fields), reached)


@pytest.mark.parametrize("arm", ["ddp", "zero1", "zero2", "zero3"])
def test_records_that_are_right_have_no_fault(arm):
    for how in ({}, GPU, VIRTUAL, {"accumulation": 4}, {"precision": "fp32"}):
        assert faults(finished(arm=arm, **how)) == []
    without_windows = changed(finished(), measure_version=2, time__window_s=None)
    for fields in (script(), script(repair="engaged"), failed("run"), without_windows):
        assert faults(fields) == []


def test_the_shape_is_that_of_a_record_really_written(trained):
    """Every field of the shaped records, at any depth, is also in a real record, with the same type."""
    real = trained("zero2", *CAST).record
    assert faults(real) == []
    assert unlike(finished(), real) == []


def unlike(ours, theirs, path: str = "") -> list[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if path.endswith("at_peak"):
            return []  # the components at the peak depend on the run
        missing = [f"{path}.{name} is not in a real record" for name in ours if name not in theirs]
        both = [name for name in ours if name in theirs]
        return missing + [words for name in both for words in unlike(ours[name], theirs[name], f"{path}.{name}")]
    if isinstance(ours, list) and isinstance(theirs, list) and ours and theirs:
        return unlike(ours[0], theirs[0], f"{path}.0")
    if ours is None or theirs is None or isinstance(ours, (int, float)) == isinstance(theirs, (int, float)):
        return []
    return [f"{path} is {ours!r}, but in a real record {theirs!r}"]


PLANTED: list[tuple[dict, dict]] = [
    # incomplete, or an empty run counted as a success
    ({}, {"requested__micro_batch": None}),
    ({}, {"observed__steps": 0}),
    ({}, {"time__step_s": []}),
    ({}, {"loss__train": [2.0, 1.0]}),  # also of a logger of every tenth step
    ({}, {"loss__train": [2.0] * 12}),
    (VIRTUAL, {"loss__train": [1.0, 2.0]}),
    # impossible
    ({}, {"finished_utc": "2026-01-02T03:04:05"}),  # without its time zone
    ({}, {"time__setup_s": 100.0}),
    ({}, {"time__window_s": None}),
    (GPU | {"step": 0.001}, {}),
    # observed is not what was requested
    ({}, {"observed__stage": 1}),
    ({}, {"observed__arm": "zero3"}),
    ({}, {"observed__wrapper": "DistributedDataParallel"}),
    ({}, {"observed__offload_optimizer": "cpu"}),
    ({}, {"observed__optimizer": "SGD"}),
    ({"arm": "fsdp2"}, {}),
    ({}, {"observed__deepspeed": None}),
    ({}, {"observed__deepspeed__zero_optimization__stage": 3}),
    ({}, {"requested__config_file": "accelerate_configs/zero3.yaml"}),
    ({"precision": "bf16"}, {"observed__autocast": None}),
    ({"arm": "ddp"}, {"observed__dtypes__moments": "bfloat16"}),
    ({"arm": "ddp"}, {"observed__dtypes__weights": "float32"}),
    ({"ranks": 4}, {"observed__ranks_counted": 1}),
    ({}, {"observed__tokens_per_step": 255}),
    # 2: the batch lacks the world size, or contains it twice; 6: it lacks the passes
    ({"ranks": 4}, {"observed__rows_per_step": 2}),
    ({"ranks": 4}, {"observed__rows_per_step": 32}),
    ({"accumulation": 4}, {"observed__rows_per_step": 4}),
    ({"accumulation": 4}, {ENGINE_PASSES: 1}),
    # 5: profilers, which prevent overlap
    ({}, {"observed__deepspeed__wall_clock_breakdown": True}),
    ({}, {"observed__deepspeed__flops_profiler": {"enabled": True}}),
    # memory: parts fit into wholes
    (GPU, {f"{DEVICE}peak_reserved_bytes": 10**6}),
    (GPU, {f"{DEVICE}peak_allocated_bytes": 10**6}),
    (GPU, {f"{DEVICE}peak_reserved_bytes": None}),
    ({}, {f"{DEVICE}host_peak_bytes": 600}),
    ({}, {f"{PART}at_peak__weights": 10**10}),
    ({}, {f"{PART}after_step__weights": 10**10}),
    ({}, {f"{PART}at_peak__moments": 10**5}),
    *(({}, {f"{PART}after_step": {name: 10**5}}) for name in ("moments", "master", "weights", "gradients")),
    ({"arm": "zero3"}, {"observed__held_parameters_per_rank": [100, 100]}),
    # files
    *(({}, {"observed__saved": SAVED | {"bytes": size}}) for size in (10**9, 10**5, 3 * 10**6)),
    ({}, {"observed__saved": SAVED | {"parameters": 10**5}}),
    # bytes
    ({}, {"traffic__per_rank__0__all_reduce__bytes": 1}),
    ({}, {"traffic__per_rank__0__all_reduce__calls": 0}),
    ({}, {"traffic__per_rank__0__all_reduce__calls": 10**9}),
    *(({}, {"traffic__kernel_bytes_written": [size, size]}) for size in (10**5, 10**8)),
    # the published script
    (SCRIPT, {"observed__runs__1__deepspeed_initialize_calls": 1}),
    (SCRIPT, {"observed__runs__0__training_s": 100.0}),
]
IMPOSSIBLE = [
    *(({}, {"loss__train__4": loss}, f"the loss of the training is {loss:g}") for loss in (0.0, -1.0, 1e308)),
    ({}, {"loss__eval__0__eval_loss": 0.0}, "the loss of an evaluation is 0"),
    ({}, {"loss__eval__0__accuracy": 90.0}, "the accuracy is 90"),
    ({}, {f"{DEVICE}host_peak_bytes": 10**12}, "rank 0: host_peak_bytes is more than its host has"),
    *((GPU, {f"{DEVICE}{name}": 2 * 10**11}, f"rank 0: {name} is more than its device has") for name in ON_DEVICE),
    (SCRIPT, {"observed__runs": []}, "no training is recorded"),
    (SCRIPT, {"observed__runs__1__steps": 0}, "training 2 took no step"),
    (SCRIPT, {"observed__runs__2__losses": []}, "training 3 took no step"),
    (SCRIPT, {"observed__runs__0__training_s": 0}, "training 1 took no step, no time"),
]


@pytest.mark.parametrize(("how", "changes", "words"), IMPOSSIBLE)
def test_a_record_of_impossible_values_is_read_by_nobody(tmp_path, how, changes, words):
    """The report, the verdicts and `study keep` name it, in the same words. A run that failed may have such values."""
    fields = script(**changes) if how is SCRIPT else changed(finished(**how), **changes)
    put(tmp_path / "runs", fields)
    loaded = shaped.runs(tmp_path / "runs")
    (reason,) = loaded.set_aside
    assert (len(loaded), words in reason) == (0, True), reason
    assert reason in evidence.gather(loaded).set_aside
    kept, (left_out,) = keep.keep([tmp_path / "runs"], tmp_path / "machine")
    assert (kept, words in left_out) == (0, True)
    error = {"kind": "E", "message": "m", "what_to_do": "w"}
    assert impossible(shaped.record(fields | {"status": "failed", "error": error})) == []


def test_a_planted_fault_is_named(golden):
    """The first fault that the audit names is of what was changed."""
    lines = []
    for how, changes in PLANTED:
        fields = script(**changes) if how is SCRIPT else changed(finished(**how), **changes)
        named = faults(fields)
        assert named, (how, changes)
        lines.append(f"{how or ''} {changes or ''}: {named[0]}")
    golden("audit_faults.txt", "\n".join(lines))


@pytest.mark.parametrize(
    "changes",
    [
        {"observed__ranks": 0},
        {"time__step_s": [0.1, 0.0, 0.1]},
        {"memory__per_rank__1__host_peak_bytes": -1},
        {"memory__per_rank__1__host_peak_bytes": 0},
        {"time__mfu": 0.9},
        {"schema": 0},
        {"loss__train__3": float("nan")},
        {"run_id": "../../x"},
    ],
)
def test_what_is_not_a_record_at_all_is_refused_before(tmp_path, changes):
    fields = changed(finished(), **changes)
    with pytest.raises(ValidationError):
        shaped.record(fields)
    put(tmp_path, finished("run"))
    (tmp_path / "run" / "record.json").write_text(json.dumps(fields))
    (reason,) = evidence.gather(shaped.runs(tmp_path)).set_aside
    assert "is not a valid record" in reason


def test_a_record_without_memory_is_set_aside_and_judging_goes_on(tmp_path):
    """It used to end `study claims` with a division by zero, for which the message blamed a claim."""
    others = [finished(f"{arm}-{number}", arm) for arm in ("ddp", "zero2") for number in (1, 2)]
    empty = finished("empty", "zero3")
    zeros = json.loads(json.dumps(empty["memory"]), parse_int=lambda _: 0)
    put(tmp_path, empty | {"memory": zeros}, *others)
    loaded = shaped.runs(tmp_path)
    (reason,) = evidence.gather(loaded).set_aside
    assert "empty" in reason
    claims = [claim for claim in files.read_all() if claim.basis == MEASURED]
    assert len(ledger.judge_all(claims, evidence.gather(loaded))) == len(claims) > 0


@pytest.mark.parametrize("arm", ["ddp", "zero1", "zero2", "zero3"])
def test_counts_of_several_steps(arm):
    """Ten steps counted as a single step: no gradient is reduced that often in a step."""
    fields = finished(arm=arm, accumulation=3)
    counts = fields["traffic"]["per_rank"][0]
    for moved in counts.values():
        sizes = {dtype: 10 * size for dtype, size in moved["bytes_by_dtype"].items()}
        moved |= {"bytes": 10 * moved["bytes"], "bytes_by_dtype": sizes}
    named = faults(changed(fields, traffic__per_rank=[counts] * 2))
    assert any("what all_reduce, reduce_scatter, reduce moved" in fault for fault in named), named


def test_ranks_that_take_turns_at_being_slow_are_not_slower_for_it():
    """Two ranks, of 0.9 and 1.1 s and then of 1.1 and 0.9: two steps in 2.0 s of wall time, not in 2.2."""
    times = {"time__step_s": [1.1] * 6, "time__window_s": 6.0, "energy__steps": 6}
    fields = changed(finished(step=1.0), **times)
    assert faults(fields) == []
    assert metrics.tokens_per_s(shaped.record(fields)) == 256
    for window_s in (6.7, 3.2):
        (fault,) = faults(changed(fields, time__window_s=window_s))
        assert f"the time of the timed windows in s is {window_s}" in fault


def test_3_more_than_this_machine_was_measured_to_do(tmp_path):
    """`study peaks` leaves its file above the runs. A faster run is not evidence. Other machines' do not count."""
    right = finished(**GPU)
    assert faults(right, reached=700e12) == []
    put(tmp_path / "runs", right)
    for devices, count in ((right["hardware"]["devices"], 1), ([{"name": "NVIDIA L4", "memory_bytes": 2**34}], 0)):
        peaks = {kind: {"median": 1e12} for kind in ("bf16", "tf32")}
        (tmp_path / "peaks.json").write_text(json.dumps({"hardware": {"devices": devices}, "flops_per_s": peaks}))
        assert len(evidence.gather(shaped.runs(tmp_path / "runs")).set_aside) == count


def test_11_the_first_rank_alone():
    fields = finished(ranks=4)
    lists = ("memory__per_rank", "traffic__per_rank", "memory__components__per_rank")
    for path in (*lists, "observed__held_parameters_per_rank"):
        values = functools.reduce(dict.get, path.split("__"), fields)
        (fault,) = faults(changed(fields, **{path: values[:1]}))
        assert fault.endswith("is 1, but should be 0 or 4")


def test_12_out_of_memory_is_an_answer_and_not_a_gap(tmp_path):
    """The record must say why, and no number takes the place of the missing measurement."""
    gathered = evidence.gather(shaped.runs(put(tmp_path, failed("known"), failed("silent") | {"error": None})))
    assert [run.status for run in gathered.runs] == ["oom"]
    assert "'error' does not say why" in gathered.set_aside[0]
    claim, where = SimpleNamespace(kind="memory", conditions={}), {"arm": "zero2"}
    finding = record_checks.observed(gathered, claim, field="memory.per_rank.0.host_peak_bytes", where=where)
    assert (finding.value, finding.without) == (None, "not tested here")
    assert record_checks.ran(gathered, claim, where=where).value == "oom"
