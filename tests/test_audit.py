"""Faults of real instruments, planted one at a time in a correct record: the audit names this fault and no other.

The twelve are those of published benchmarks. If a record cannot have one, because it does not keep the number, the
comparison of runs must catch it: those tests say so. Arms of unlike batches (9) are in `test_checks`.
"""

import json
from types import SimpleNamespace

import pytest
import shaped
from pydantic import ValidationError
from shaped import changed, failed, finished, put, script
from test_parity import flags_for

from study.errors import Stop
from study.ledger import audit, evidence, files, ledger, record_checks
from study.ledger.evidence import Evidence
from study.ledger.model import MEASURED
from study.records import metrics

PER_STEP = ("observed__rows_per_step", "observed__tokens_per_step")
ENGINE_PASSES = "observed__deepspeed__gradient_accumulation_steps"
VIRTUAL = {"virtual": True, "ranks": 8}
GPU = {"gpu": True, "model": "gpt2", "sequence": 1024, "step": 0.2}


def faults(fields: dict, reached: float | None = None) -> list[str]:
    return audit.faults(shaped.record(fields), reached)


def caught(fields: dict, words: str, alone: bool = True) -> None:
    """The record has a fault with these words, and if `alone` no other fault."""
    named = faults(fields)
    assert any(words in fault for fault in named), named
    assert not alone or all(words in fault for fault in named), named


def scaled(fields: dict, factor: float, *paths: str) -> dict:
    """The same with the numbers at these paths multiplied."""
    for path in paths:
        part, name = path.split("__")
        fields = changed(fields, **{path: type(fields[part][name])(fields[part][name] * factor)})
    return fields


# --- a record that is right ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("how", [{}, GPU, {"virtual": True, "ranks": 8}, {"accumulation": 4}, {"precision": "fp32"}])
def test_a_record_that_is_right_has_no_fault(arm, how):
    assert faults(finished(arm=arm, **how)) == []


def test_other_records_that_are_right_have_no_fault():
    assert faults(script()) == faults(script(repair="engaged")) == faults(failed("run")) == []


def test_all_kept_records_pass():
    gathered = evidence.gather(shaped.runs(*sorted((evidence.ROOT / "reports").glob("*/runs"))))
    assert gathered.runs
    assert gathered.set_aside == ()


def test_the_shape_is_that_of_a_record_really_written(trained):
    """Every field of the shaped records, at any depth, is also in a real record, with the same type."""
    real = trained("zero2", *flags_for("wikitext", "bf16_cast", 1)).record
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


# --- what cannot be ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"requested__micro_batch": None}, "requested.micro_batch is None in a finished run"),
        ({"finished_utc": "yesterday"}, "is not a span of time"),
        ({"finished_utc": "2026-01-02T03:04:05"}, "is not a span of time"),  # without its time zone
        # An empty run is not a success.
        ({"observed__steps": 0}, "observed.steps is 0"),
        ({"time__step_s": []}, "no step was timed"),
        ({"loss__train": []}, "has no loss"),
        ({"loss__train": [2.0] * 12}, "the loss is the same at every step"),
        ({"loss__train": [2.0, 1.0]}, "12 steps have 2 losses"),  # also of a logger of every tenth step
        # Two numbers that disagree.
        ({"observed__stage": 1}, "stage: requested 2, observed 1"),
        ({"observed__stage": None}, "stage: requested 2, observed None"),
        ({"observed__arm": "zero3"}, "arm: requested 'zero2', observed 'zero3'"),
        ({"observed__wrapper": "DistributedDataParallel"}, "wrapper: requested 'DeepSpeedEngine'"),
        ({"observed__offload_optimizer": "cpu"}, "offload_optimizer: requested 'none', observed 'cpu'"),
        ({"observed__checkpointing": True}, "checkpointing: requested False, observed True"),
        ({"time__setup_s": 100.0}, "set-up and steps took 100"),
        ({"memory__components__per_rank__0__at_peak__weights": 10**10}, "components at_peak are"),
        ({"memory__components__per_rank__1__after_step__weights": 10**10}, "rank 1: components after_step are"),
        ({"observed__tokens_per_step": 255}, "255 tokens a step are not 4 rows of 64"),
        ({"energy__steps": 12}, "energy is of 12 steps, but 7 were timed"),
        ({"traffic__per_rank__0__all_reduce__bytes": 1}, "by dtype"),
        ({"traffic__kernel_bytes_written": [10**5, 10**5]}, "but the kernel saw 1e+05 written"),
        ({"traffic__kernel_bytes_written": [10**8, 10**8]}, "but the kernel saw 1e+08 written"),
    ],
)
def test_a_planted_fault_is_named_also_after_reading(tmp_path, changes, words):
    fields = changed(finished(), **changes)
    assert any(words in fault for fault in faults(fields))
    (reason,) = evidence.gather(shaped.runs(put(tmp_path, fields))).set_aside
    assert words in reason


@pytest.mark.parametrize(
    ("how", "changes", "words"),
    [
        ({"ranks": 4}, {"observed__ranks_counted": 1}, "4 ranks, but 1 took part"),
        ({"accumulation": 4}, {"observed__accumulation": 1}, "accumulation: requested 4, observed 1"),
        ({"accumulation": 4}, {ENGINE_PASSES: 1}, "gradient_accumulation_steps is 1, but 4 was requested"),
        ({"arm": "ddp"}, {"observed__dtypes__moments": "bfloat16"}, "the optimizer's moments are bfloat16"),
        ({"arm": "ddp"}, {"observed__dtypes__weights": "float32"}, "weights: bf16_cast means bfloat16"),
        ({"precision": "bf16"}, {"observed__autocast": None}, "autocast: requested 'bf16', observed None"),
        (VIRTUAL, {"loss__train": [1.0, 2.0]}, "the run is virtual, but has a loss"),
    ],
)
def test_a_planted_fault_is_all_that_is_named(how, changes, words):
    caught(changed(finished(**how), **changes), words)


@pytest.mark.parametrize(
    "changes",
    [
        {"observed": [1]},
        {"memory__components": [3]},
        {"observed__ranks": "two"},
        {"observed__ranks": 0},
        {"observed__parameters": 0},
        {"time__step_s__0": -0.1},
        {"time__step_s": [0.1, 0.0, 0.1]},
        {"memory__per_rank__1__host_peak_bytes": -1},
        {"time__mfu": 0.9},
        {"schema": 0},
        {"observed__colour": "red"},
        {"loss__train__3": float("nan")},
        {"time__setup_s": float("inf")},
    ],
)
def test_what_is_not_a_record_at_all_is_refused_before(tmp_path, changes):
    fields = changed(finished(), **changes)
    with pytest.raises(ValidationError):
        shaped.record(fields)
    (reason,) = evidence.gather(shaped.runs(put(tmp_path, fields))).set_aside
    assert "is not a valid record" in reason


# --- the twelve ----------------------------------------------------------------------------------------------------


def test_2_ranks_averaged_instead_of_added():
    """The batch lacks the world size, or contains it twice."""
    for factor in (1 / 4, 4):
        caught(scaled(finished(ranks=4), factor, *PER_STEP), "rows x 1 passes x 4 ranks are 8")


def test_3_more_than_the_peak():
    caught(finished(**GPU | {"step": 0.001}), "which is not between 0 and 1")
    right = finished(**GPU)
    assert faults(right, reached=700e12) == []
    assert any("a matrix product on this device reaches 1" in fault for fault in faults(right, reached=1e12))


def test_3_more_than_this_machine_was_measured_to_do(tmp_path):
    """`study peaks` leaves its file above the runs. A faster run is not evidence. Other machines' do not count."""
    right = finished(**GPU)
    put(tmp_path / "runs", right)
    for devices, count in ((right["hardware"]["devices"], 1), ([{"name": "NVIDIA L4", "memory_bytes": 2**34}], 0)):
        peaks = {kind: {"median": 1e12} for kind in ("bf16", "tf32")}
        (tmp_path / "peaks.json").write_text(json.dumps({"hardware": {"devices": devices}, "flops_per_s": peaks}))
        assert len(evidence.gather(shaped.runs(tmp_path / "runs")).set_aside) == count


def test_4_part_of_a_step_read_as_a_step():
    """DeepSpeed's autotuner times the forward pass. Records have whole steps; a part of a step is refused."""
    for quantity in ("time.forward_s", "forward_s", "time.step_s"):
        with pytest.raises(Stop, match="There is no quantity"):
            ratio_of(quantity, arms_and_seeds())


@pytest.mark.parametrize("name", ["wall_clock_breakdown", "flops_profiler", "comms_logger"])
def test_5_a_profiler_that_prevents_overlap(name):
    on = True if name == "wall_clock_breakdown" else {"enabled": True}
    words = [f"DeepSpeed's {name} was on, which adds synchronisation"]
    assert faults(changed(finished(), **{f"observed__deepspeed__{name}": on})) == words
    assert faults(changed(finished(), **{f"observed__deepspeed__{name}": False})) == []


def test_ranks_that_take_turns_at_being_slow_are_not_slower_for_it():
    """Two ranks, of 0.9 and 1.1 s and then of 1.1 and 0.9: two steps in 2.0 s of wall time, not in 2.2."""
    times = {"time__step_s": [1.1] * 6, "time__window_s": 6.0, "energy__steps": 6}
    fields = changed(finished(step=1.0), **times)
    assert faults(fields) == []
    assert metrics.tokens_per_s(shaped.record(fields)) == 256
    for window_s in (6.7, 3.2):
        words = f"the timed windows took {window_s} s, but their steps 6.6"
        caught(changed(fields, time__window_s=window_s), words, alone=False)


def test_a_record_of_version_2_has_no_wall_time_of_its_windows():
    """Its rates refer to the sum of its steps. In a newer record the missing wall time is a fault."""
    old = changed(finished(), measure_version=2, time__window_s=None)
    assert faults(old) == []
    caught(changed(old, measure_version=3), "the wall time of the timed windows is not recorded")


def test_6_accumulation_left_out():
    caught(scaled(finished(accumulation=4), 1 / 4, *PER_STEP), "4 passes x 2 ranks are 16")


def test_7_scaling_without_a_run_on_a_single_rank():
    """No record has a fault, but a ratio to a single rank has no other side, so there is none."""
    two = [finished(f"r{n}", "zero2", ranks=2, seed=n) for n in range(3)]
    finding = ratio_of("tokens_per_s", two, {"ranks": 2}, {"ranks": 1})
    assert (finding.value, finding.without) == (None, "not tested here")
    assert "no run has ranks 1" in finding.working
    single = [finished(f"s{n}", "zero2", ranks=1, seed=n, step=0.2) for n in range(3)]
    assert ratio_of("tokens_per_s", two + single, {"ranks": 2}, {"ranks": 1}).value == pytest.approx(4)


def test_8_arms_of_unlike_states_are_not_compared():
    """OpenTau: Adam held its moments in bf16 in one arm only, which was three times as fast.

    Should a record of such an arm pass the audit, it still makes no ratio.
    """
    assert ratio_of("step_s", arms_and_seeds()).value == pytest.approx(1)
    ddp, zero2 = arms_and_seeds()[:3], arms_and_seeds()[3:]
    unlike = zero2 + [changed(fields, observed__dtypes__moments="float16") for fields in ddp]
    finding = ratio_of("step_s", unlike)
    assert finding.value is None
    assert "moments are float32 on one side and float16 on the other" in finding.working


def test_10_recomputation_counted_as_work():
    fields = finished(**GPU)
    repeated = scaled(fields, 4 / 3, "time__flops_per_rank_and_step")
    caught(repeated, "operations a rank and step, but the model's own are")
    caught(changed(fields, observed__parameters=10**6), "gpt2 has 124439808 parameters", alone=False)


def test_11_the_first_rank_alone():
    fields = finished(ranks=4)
    parts = {"memory": fields["memory"], "traffic": fields["traffic"]}
    parts["memory__components"] = fields["memory"]["components"]
    for path, part in parts.items():
        caught(changed(fields, **{f"{path}__per_rank": part["per_rank"][:1]}), "1 of 4 ranks have reported")
    held = fields["observed"]["held_parameters_per_rank"][:1]
    caught(changed(fields, observed__held_parameters_per_rank=held), "1 of 4 ranks have reported")


def test_12_out_of_memory_is_an_answer_and_not_a_gap(tmp_path):
    """The record must say why, and no number takes the place of the missing measurement."""
    gathered = evidence.gather(shaped.runs(put(tmp_path, failed("known"), failed("silent") | {"error": None})))
    assert [run.status for run in gathered.runs] == ["oom"]
    assert "'error' does not say why" in gathered.set_aside[0]
    claim, where = SimpleNamespace(kind="memory", conditions={}), {"arm": "zero2"}
    finding = record_checks.observed(gathered, claim, field="memory.per_rank.0.host_peak_bytes", where=where)
    assert (finding.value, finding.without) == (None, "not tested here")
    assert record_checks.ran(gathered, claim, where=where).value == "oom"


# --- memory, counts, the published script --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peak_reserved_bytes": 10**6}, "peak_allocated is"),
        ({"peak_reserved_bytes": 2 * 10**11}, "peak_reserved is 200000000000, more than the device"),
        ({"device_used_bytes": 2 * 10**11}, "device_used is 200000000000, more than the device"),
        ({"peak_allocated_bytes": 10**6}, "above the allocator's peak"),
    ],
)
def test_memory_is_within_what_holds_it(changes, words):
    fields = finished(**GPU)
    ranks = [rank | changes for rank in fields["memory"]["per_rank"]]
    caught(changed(fields, memory__per_rank=ranks), words, alone=False)


def without_memory(fields: dict) -> dict:
    """The record, with every number of its memory at 0."""

    def zeros(value):
        if isinstance(value, dict):
            return {name: zeros(each) for name, each in value.items()}
        if isinstance(value, list):
            return [zeros(each) for each in value]
        return 0 if isinstance(value, int) else value

    return fields | {"memory": zeros(fields["memory"])}


def test_a_record_without_memory_is_set_aside_and_judging_goes_on(tmp_path):
    """It used to end `study claims` with a division by zero, for which the message blamed a claim."""
    others = [finished(f"{arm}-{number}", arm) for arm in ("ddp", "zero2") for number in (1, 2)]
    put(tmp_path, without_memory(finished("empty", "zero3")), *others)
    loaded = shaped.runs(tmp_path)
    (reason,) = evidence.gather(loaded).set_aside
    assert "empty/record.json is not a valid record: memory." in reason
    claims = [claim for claim in files.read_all() if claim.basis == MEASURED]
    assert len(ledger.judge_all(claims, loaded)) == len(claims) > 0


@pytest.mark.parametrize("arm", ["ddp", "zero1", "zero2", "zero3"])
def test_counts_of_several_steps(arm):
    """Ten steps counted as a single step: no gradient is reduced that often in a step."""
    fields = finished(arm=arm, accumulation=3)
    counts = fields["traffic"]["per_rank"][0]
    for moved in counts.values():
        sizes = {dtype: 10 * size for dtype, size in moved["bytes_by_dtype"].items()}
        moved |= {"bytes": 10 * moved["bytes"], "bytes_by_dtype": sizes}
    wrong = changed(fields, traffic__per_rank=[counts] * 2)
    caught(wrong, "more often than in a step", alone=False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"observed__runs": []}, "no training is recorded"),
        ({"observed__runs__1__steps": 0}, "training 2 is done, but took no step"),
        ({"observed__runs__2__losses": []}, "training 3 is done, but took no step or has no loss"),
        ({"observed__runs__2__losses": [-1.0]}, "observed.runs.2.losses.0 is -1.0"),
        ({"observed__runs__0__training_s": 0}, "training 1 took no time"),
        ({"observed__runs__0__training_s": 100.0}, "set-up and steps took 102"),
    ],
)
def test_the_published_script_is_audited_as_well(changes, words):
    caught(script(**changes), words, alone=False)


# --- how they are compared -----------------------------------------------------------------------------------------


def arms_and_seeds() -> list[dict]:
    """Three seeds of DDP and of ZeRO-2."""
    return [finished(f"{arm}{n}", arm, seed=n) for arm in ("ddp", "zero2") for n in range(3)]


def ratio_of(quantity: str, fields: list[dict], of=None, to=None):
    """zero2 over ddp, unless other sides are given."""
    runs, claim = Evidence(tuple(map(shaped.run, fields))), SimpleNamespace(kind="time", conditions={})
    of, to = of or {"arm": "zero2"}, to or {"arm": "ddp"}
    return record_checks.ratio(runs, claim, quantity=quantity, of=of, to=to)
