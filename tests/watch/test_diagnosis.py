"""Findings: each planted mistake is named with its numbers, and a record without it does not have the finding."""

import re

import pytest

from study.cli import diagnosis as command
from study.core.arms import ROOT
from study.core.library_defaults import known_libraries
from study.known.findings import Finding, ordered, texts
from study.records import store
from study.records.schema import Record
from study.watch.about import judge
from tests.cases import for_each
from tests.conftest import forked, table
from tests.shaped import changed, finished, put

RUNS = ROOT / "reports/cpu-2core/runs"
TABLES = table("watch/planted_records.toml")
RECORDS = TABLES["records"]
PLANTED = TABLES["planted"]
EVERYDAY = TABLES["everyday"]


def found(run: Record) -> list[str]:
    return [finding.id for finding in judge(run)[0]]


DEEPSPEEDS = {name for names in known_libraries()["deepspeed"]["sections"].values() for name in names if "_" in name}
OF_DEEPSPEED = re.compile(rf"(?<![\w.])(?:{'|'.join(DEEPSPEEDS - {'gradient_accumulation_steps'})}|stage3_\w+)\b")


@for_each("wrapper", ["DistributedDataParallel", "FullyShardedDataParallel"])
@for_each("case", PLANTED, ids=[case["finding"] for case in PLANTED])
def test_no_remedy_names_a_key_of_deepspeed_where_it_does_not_train(case, wrapper):
    """Whatever else is wrong: what only says that DeepSpeed trains, or should, is left as it is."""
    ddp = store.load(RUNS / RECORDS["ddp"]).model_dump(mode="json", by_alias=True)
    others = ("observed__stage", "observed__deepspeed", "observed__wrapper")
    changes = {path: value for path, value in case.get("changes", {}).items() if path not in others}
    judged, _ = judge(Record.model_validate(changed(ddp, **changes | {"observed__wrapper": wrapper})))
    assert [each.id for each in judged if OF_DEEPSPEED.search(each.remedy or "")] == []


@for_each("case", PLANTED, ids=[case["finding"] for case in PLANTED])
def test_a_planted_mistake_is_found_and_its_record_without_it_is_clean(case):
    """Each rank has the same peak, in MB, and moves the same bytes."""
    right = store.load(RUNS / RECORDS[case["record"]])
    changes = dict(case.get("changes", {}))
    if "peak" in case:
        held = {role: size * 10**6 for role, size in case["peak"].items()}
        each = {"at_peak": held, "after_step": held, "tracked_peak_bytes": sum(held.values())}
        changes["memory__components__per_rank"] = [each] * len(right.memory.components.per_rank)
    if "moved" in case:
        moved = {kind: {"calls": 3, "bytes": each, "bytes_by_dtype": {}} for kind, each in case["moved"].items()}
        changes["traffic__per_rank"] = [moved] * len(right.traffic.per_rank)
    wrong = Record.model_validate(changed(right.model_dump(mode="json", by_alias=True), **changes))
    (finding,) = [each for each in judge(wrong)[0] if each.id == case["finding"]]
    assert case["finding"] not in found(right)
    if "bytes" in case:
        assert case["bytes"] in (finding.memory_bytes, finding.traffic_bytes)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("mine.yaml", "write `gradient_clipping: -1.0` in mine.yaml"),
        ("ds.json", 'write `"gradient_clipping": 0.0` in ds.json'),
        ("the script's DeepSpeed config", 'write `"gradient_clipping": 0.0` in the script\'s DeepSpeed config'),
        (None, "in a yaml of Accelerate, or `"),  # a plugin in the script
    ],
)
def test_a_default_is_no_mistake_and_its_remedy_names_the_file_that_the_script_has(source, says):
    right = store.load(RUNS / RECORDS["zero2"]).model_dump(mode="json", by_alias=True)
    promised = {"source": source, "deepspeed": True, "stage": 2}
    default = Record.model_validate(changed(right, promised=promised, observed__clipping=1.0))
    (finding,) = [each for each in judge(default)[0] if each.id == "clipping_by_default"]
    assert (finding.is_surely_wrong, finding.may_be) == (False, True)
    assert says in finding.remedy


@pytest.mark.parametrize("case", TABLES["alike"], ids=[case["name"] for case in TABLES["alike"]])
def test_what_looks_like_a_mistake_gets_its_true_cause_alone(case):
    right = store.load(RUNS / RECORDS[case["record"]])
    alike = Record.model_validate(changed(right.model_dump(mode="json", by_alias=True), **case["changes"]))
    assert sorted({*found(alike)} - {*found(right)}) == case["adds"]


def test_evidence_in_this_repository_exists():
    paths = [text["evidence"] for text in texts().values() if text.get("evidence", "").endswith(".py")]
    assert paths
    assert all((ROOT / path).exists() for path in paths)


def test_what_a_record_does_not_hold_is_not_judged():
    bare = Record(run_id="mine", started_utc="2026-01-02T03:04:05+00:00")
    findings, not_known = judge(bare)
    assert findings == []
    assert {"clipping", "activations", "traffic"} <= set(not_known)


@pytest.fixture(scope="module")
def everyday(tmp_path_factory):
    """The records of one real launch on two ranks, which trains once with each mistake."""
    folder = tmp_path_factory.mktemp("everyday")
    words = [str(folder), *EVERYDAY]
    launched = forked(folder, config="accelerate_configs/ddp.yaml", script="tests/watch/everyday.py", flags=words)
    assert launched.code == 0, launched.output
    return folder


def test_everyday_mistakes_are_found_in_a_real_run_and_nothing_else(everyday):
    assert {name: found(store.load(everyday / name)) for name in EVERYDAY} == EVERYDAY


def test_full_memory_comes_first_and_says_what_to_ask(everyday):
    (answer,) = command.diagnose((everyday / "oom",))
    assert answer["error"]["message"].endswith("reserved by PyTorch but unallocated.)")
    assert answer["findings"][0]["id"] == "memory_full"
    assert answer["findings"][0]["remedy"].endswith("`study oom FILE --model MODEL` names the cause")


def test_findings_are_ordered_by_size():
    costs = [{}, {"lost_s": 0.5}, {"lost_s": 0.01}, {"memory_bytes": 52}, {"memory_bytes": 1}, {"traffic_bytes": 99}]
    in_order = [Finding("", "", **cost) for cost in costs]
    assert ordered(in_order[::-1]) == in_order


def test_a_key_that_deepspeed_ignored_is_named(tmp_path):
    config = {"gradient_acumulation_steps": 4, "zero_optimization": {"stage": 2}}
    put(tmp_path, changed(finished("mine", "zero2"), observed__deepspeed=config))
    (answer,) = command.diagnose((tmp_path / "mine",))
    assert answer["findings"][0]["remedy"] == "write gradient_accumulation_steps"
