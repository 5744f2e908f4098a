"""Findings: each planted mistake is named with its numbers, and a record without it does not have the finding."""

import functools
import tomllib

import pytest
from conftest import forked
from everyday import CUDA_ERROR
from shaped import changed, finished, put

from study.cli import diagnosis as command
from study.core.arms import ROOT
from study.ledger import texts as ledger
from study.records import store
from study.records.schema import Record
from study.watch.diagnosis import diagnose, judge
from study.watch.findings import Finding, ordered, texts

RUNS = ROOT / "reports/cpu-2core/runs"
TABLES = tomllib.loads((ROOT / "tests" / "watch" / "planted_records.toml").read_text())
RECORDS = TABLES["records"]
PLANTED = TABLES["planted"]
EVERYDAY = {name: set(ids) for name, ids in TABLES["everyday"].items()}


@functools.cache
def content(name: str) -> str:
    return (RUNS / RECORDS[name] / "record.json").read_text()


def record(name: str, **changes) -> Record:
    """A committed record with other values: `observed__stage=None` replaces one, None for a section empties it."""
    raw = Record.model_validate_json(content(name)).model_dump(mode="json", by_alias=True)
    for path, value in changes.items():
        *sections, last = path.split("__")
        place = functools.reduce(lambda part, key: part[int(key) if key.isdigit() else key], sections, raw)
        place[last] = value
    return Record.model_validate(raw)


def found(run: Record) -> list[str]:
    return [finding.id for finding in diagnose(run)]


def peak(name: str, **components: int) -> dict:
    """Changes with which each rank has these components at its peak, in MB."""
    ranks = len(record(name).memory.components.per_rank)
    held = {role: size * 10**6 for role, size in components.items()}
    each = {"at_peak": held, "after_step": held, "tracked_peak_bytes": sum(held.values())}
    return {"memory__components__per_rank": [each] * ranks}


def planted(name: str) -> Record:
    case = next(case for case in PLANTED if case["finding"] == name)
    changes = case.get("changes", {})
    if "peak" in case:
        changes |= peak(case["record"], **case["peak"])
    if "moved" in case:
        ranks = len(record(case["record"]).traffic.per_rank)
        moved = {kind: {"calls": 3, "bytes": each, "bytes_by_dtype": {}} for kind, each in case["moved"].items()}
        changes["traffic__per_rank"] = [moved] * ranks
    return record(case["record"], **changes)


@pytest.mark.parametrize("case", PLANTED, ids=[case["finding"] for case in PLANTED])
def test_a_planted_mistake_is_found_and_its_record_without_it_is_clean(case):
    (finding,) = [each for each in diagnose(planted(case["finding"])) if each.id == case["finding"]]
    assert case["finding"] not in found(record(case["record"]))
    if "bytes" in case:
        assert case["bytes"] in (finding.memory_bytes, finding.traffic_bytes)


def test_each_finding_has_evidence_that_exists():
    assert {case["finding"] for case in PLANTED} <= texts().keys()
    claims = {f"study claims {each.id}" for each in (*ledger.claims(), *ledger.faults())}
    evidence = {text["evidence"] for text in texts().values() if "evidence" in text}
    assert all(each in claims or each.startswith("https://") or (ROOT / each).exists() for each in evidence)


def test_a_good_run_has_no_findings(capsys, golden):
    command.diagnose((RUNS / RECORDS["zero2"],))
    golden("command_diagnose.txt", capsys.readouterr().out)
    assert found(record("zero2")) == []


def test_what_a_record_does_not_hold_is_not_judged():
    bare = Record(run_id="mine", started_utc="2026-01-02T03:04:05+00:00")
    assert diagnose(bare) == []
    assert {"clipping", "activations", "traffic"} <= set(judge(bare)[1])
    assert "activations" not in judge(record("zero2"))[1]


def test_the_published_script_never_engaged_deepspeed():
    """Records as they are: nothing is planted. The repaired script did engage it."""
    runs = [store.load(path.parent) for path in RUNS.glob("as_printed/*/record.json")]
    by_repair = {run.requested.repair: "deepspeed_off_in_published_script" in found(run) for run in runs}
    assert by_repair["none"]
    assert not by_repair["engaged"]


@pytest.fixture(scope="module")
def everyday(tmp_path_factory):
    """The records of one real launch on two ranks, which trains once with each mistake."""
    folder = tmp_path_factory.mktemp("everyday")
    config = "accelerate_configs/ddp.yaml"
    words = [str(folder), *EVERYDAY]
    launched = forked(folder, config=config, launcher=(), script="tests/watch/everyday.py", flags=words)
    assert launched.code == 0, launched.output
    return folder


def test_everyday_mistakes_are_found_in_a_real_run_and_nothing_else(everyday):
    assert {name: set(found(store.load(everyday / name))) for name in EVERYDAY} == EVERYDAY


def test_a_launcher_that_wrapped_nothing_gets_the_right_remedy(tmp_path):
    config = "accelerate_configs/ddp.yaml"
    words = [str(tmp_path), "no_wrap"]
    assert forked(tmp_path, config=config, launcher=(), script="tests/watch/everyday.py", flags=words).code == 0
    first, second = diagnose(store.load(tmp_path / "no_wrap"))
    assert (first.id, second.id) == ("no_wrap", "same_rows")
    assert "`use_cpu: true`" in first.remedy


def test_memory_that_was_full_in_step_0_says_what_was_held_and_what_to_ask(everyday, capsys):
    run = store.load(everyday / "oom")
    assert run.status == "oom"
    assert run.error.message.endswith("unallocated.)")
    command.diagnose((everyday / "oom",))
    printed = " ".join(capsys.readouterr().out.split())
    assert "The memory was full" in printed
    assert "--model MODEL --arm ddp --ranks 2` names the tensor" in printed


def test_findings_are_ordered_by_size():
    seconds = [Finding("", lost_s=0.5), Finding("", lost_s=0.01)]
    memory = [Finding("", memory_bytes=52), Finding("", memory_bytes=1)]
    in_order = [Finding("a mistake"), *seconds, *memory, Finding("", traffic_bytes=99)]
    assert ordered(in_order[::-1]) == in_order


def test_full_memory_comes_first_and_a_key_that_deepspeed_ignored_is_named(tmp_path):
    config = {"gradient_acumulation_steps": 4, "zero_optimization": {"stage": 2}}
    error = {"kind": "OutOfMemoryError", "message": CUDA_ERROR, "what_to_do": "take fewer rows"}
    put(tmp_path, changed(finished("full", "zero2"), status="oom", error=error, observed__deepspeed=config))
    (answer,) = command.diagnose((tmp_path / "full",))
    first, second, *_ = answer["findings"]
    assert (first["id"], second["id"]) == ("memory_full", "key_mistyped")
    assert second["remedy"] == "write gradient_accumulation_steps"
