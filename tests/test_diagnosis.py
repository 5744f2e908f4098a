"""Findings: each planted mistake is named with its numbers, and a record without it does not have the finding."""

import functools

import pytest
from conftest import forked
from everyday import CUDA_ERROR
from shaped import changed, finished, put

from study.cli import diagnosis as command
from study.core.arms import ROOT
from study.core.errors import Stop
from study.ledger import texts as ledger
from study.records import store
from study.records.schema import Record
from study.watch.diagnosis import diagnose, unknown_rules
from study.watch.findings import Finding, ordered, texts

RUNS = ROOT / "reports/cpu-2core/runs"
# Real and virtual runs of this study, each without the finding that is planted into it.
RECORDS = {
    "single": "smoke/arms-single-8e1c25c5-r1.1",
    "ddp": "smoke/arms-ddp-9d0fa33e-r1.1",
    "zero1": "stages/accumulation-zero1-6c8006ed-r1.1",
    "zero2": "scoreboard/bert-large-zero2-17db9ab1-r1.1",
    "zero2 fp32": "stages/precision-zero2-d84a45f2-r1.1",
    "zero2 bf16": "stages/precision-zero2-810641b1-r1.1",
    "zero3": "scoreboard/bert-large-zero3-2e948bd0-r1.2",
    "zero3 many passes": "stages/accumulation-zero3-3d7d3906-r1.1",
    "zero3_nvme": "smoke/arms-zero3_nvme-a55ab5d0-r1.1",
    "script": "as_printed/script-single-4865fa9a-r1.1",
}
SCRIPT = {"source": "mine.yaml", "deepspeed": True, "stage": 2}  # what somebody's own script asks for


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


def moved(kind: str, nbytes: int) -> dict:
    return {kind: {"calls": 3, "bytes": nbytes, "bytes_by_dtype": {"float32": nbytes}}}


PLANTED = [  # the finding, a record, and the change that is the mistake
    ("deepspeed_off", "ddp", {"promised": SCRIPT}),
    ("other_stage", "zero2", {"promised": SCRIPT | {"stage": 3}}),
    ("fsdp_off_on_a_cpu", "ddp", {"promised": {"source": "mine.yaml", "fsdp": True}}),
    ("fsdp_off", "ddp", {"promised": {"source": "mine.yaml", "fsdp": True}, "observed__device": "cuda"}),
    ("separate_trainings", "single", {"promised": {"ranks": 2}}),
    ("gradients_not_shared", "ddp", {"traffic__per_rank": [moved("all_reduce", 8)] * 2}),
    ("no_wrap", "ddp", {"traffic__per_rank": [moved("all_reduce", 8)] * 2, "observed__distributed_type": "NO"}),
    ("clipping_differs", "zero2", {"promised": SCRIPT | {"clipping": 0.0}, "observed__clipping": 1.0}),
    ("clipping_by_default", "zero2", {"promised": SCRIPT, "observed__clipping": 1.0}),
    ("clipping_differs", "zero2", {"promised": SCRIPT | {"clipping": 0.25}, "observed__clipping": 1.0}),
    ("clip_grad_norm_ignored", "zero2", {"watched": {"clip_grad_norm": 0.5}}),
    ("clipping_missing", "ddp", {"promised": {"clipping": 1.0}}),
    ("accumulation_set_twice", "zero2", {"promised": SCRIPT | {"accumulation": 4}}),
    ("accumulate_unused", "ddp", {"watched": {"loss_parts": 4}}),
    ("passes_differ", "zero1", {"watched": {"loss_parts": 16}}),
    ("loss_divided_twice", "zero1", {"watched": {"loss_parts": 4, "loss_divisor": 4.0}}),
    ("gradients_cleared", "zero1", {"watched": {"loss_parts": 1, "passes_cleared": 3}}),
    ("unequal_rows", "ddp", {"watched": {"rows_per_rank": [8, 4]}}),
    ("same_rows", "ddp", {"watched": {"rows_per_rank": [8, 8], "inputs_per_rank": [["8x4 a", "8x4 b"]] * 2}}),
    ("no_sync_unused", "ddp",
     {"observed__accumulation": 4, "requested__accumulation": 4,
      "traffic__per_rank": [moved("all_reduce", 4 * 4 * 790_016)] * 2}),
    ("cast_instead_of_autocast", "zero2", {"promised": SCRIPT | {"precision": "bf16"}}),
    ("no_autocast", "ddp", {"promised": {"precision": "bf16"}}),
    ("no_fp32_copy", "single", {"observed__dtypes": {"weights": "bfloat16", "moments": "bfloat16", "master": None}}),
    ("loss_scale_stuck", "zero2 bf16", {"observed__autocast": "fp16", "observed__loss_scale": 65536.0}),
    ("nvme_is_cpu", "zero2",
     {"promised": SCRIPT | {"offload_optimizer": "nvme"}, "observed__offload_optimizer": "cpu"}),
    ("states_not_offloaded", "zero2", {"promised": SCRIPT | {"offload_optimizer": "cpu"}}),
    ("weights_not_offloaded", "zero2", {"promised": SCRIPT | {"offload_param": "cpu"}}),
    ("optimizer_replaced", "zero2",
     {"promised": SCRIPT | {"optimizer": "SGD"}, "observed__optimizer": "DeepSpeedCPUAdam"}),
    ("checkpointing_off", "zero2", {"promised": SCRIPT | {"checkpointing": True}}),
    ("fp32_copies", "zero2",
     {"observed__dtypes": {"weights": "float32", "master": "float32", "moments": "float32"}}),
    ("buckets_dominate", "zero2",
     {"observed__bucket_elements": 5 * 10**9} | peak("zero2", weights=670, buckets=10_000)),
    ("second_bucket", "zero2", {"observed__overlap": True} | peak("zero2", weights=670, buckets=400)),
    ("all_weights_gathered", "zero3 many passes",
     peak("zero3 many passes", gathered_weights=4, weights=2, activations=3)),
    ("frozen_weights_gathered", "zero3 many passes",
     peak("zero3 many passes", gathered_weights=4, weights=2, activations=3)
     | {"observed__trained_parameters": 1000, "observed__checkpointing": True}),
    ("linear_keeps_weights", "zero3", {"observed__linear_parameters_kept": 300_000_000}),
    ("weights_stay_gathered", "zero3", peak("zero3", gathered_weights=400, weights=42)),
    ("not_all_partitioned", "zero3", {"observed__held_parameters_per_rank": [100_000_000]}),
    ("activations_dominate", "zero2", peak("zero2", activations=600, weights=500)),
    ("zero_on_one_rank", "zero2", {"observed__ranks": 1, "observed__ranks_counted": 1}),
    ("states_replicated", "ddp", peak("ddp", weights=30, moments=60, gradients=30, activations=80)),
    ("loaded_whole", "zero3", {"watched": {"host_freed_bytes": [700_000_000] * 16}}),
    ("gathers_repeated", "zero3",
     {"observed__accumulation": 4, "requested__accumulation": 4,
      "traffic__per_rank": [moved("all_gather", 12 * 670_287_876)]}),
    ("reductions_repeated", "zero2",
     {"observed__accumulation": 4, "requested__accumulation": 4,
      "traffic__per_rank": [moved("all_reduce", 4 * 670_287_876)]}),
    ("deepspeed_off_in_published_script", "script", {"observed__runs__0__arguments_say_deepspeed": True}),
]  # fmt: skip
COSTS = {  # the bytes that findings name, by hand: of memory on a rank, or moved in a step
    "buckets_dominate": 10 * 10**9,
    "second_bucket": 200 * 10**6,
    "all_weights_gathered": 4 * 10**6,
    "frozen_weights_gathered": 4 * 10**6,
    "weights_stay_gathered": 400 * 10**6,
    "linear_keeps_weights": 2 * 300_000_000,
    "activations_dominate": 600 * 10**6,
    "gathers_repeated": 12 * 670_287_876,
    "reductions_repeated": 4 * 670_287_876,
}


@pytest.mark.parametrize(("name", "run", "changes"), PLANTED, ids=[case[0] for case in PLANTED])
def test_a_planted_mistake_is_found_and_its_record_without_it_is_clean(name, run, changes):
    (finding,) = [each for each in diagnose(record(run, **changes)) if each.id == name]
    assert name not in found(record(run))
    if name in COSTS:
        assert COSTS[name] in (finding.memory_bytes, finding.traffic_bytes)


def test_each_finding_has_evidence_that_exists():
    assert {name for name, *_ in PLANTED} <= texts().keys()
    claims = {f"study claims {each.id}" for each in (*ledger.claims(), *ledger.faults())}
    evidence = {text["evidence"] for text in texts().values() if "evidence" in text}
    assert all(each in claims or each.startswith("https://") or (ROOT / each).exists() for each in evidence)


def test_mistakes_come_before_costs_and_larger_costs_before_smaller_ones():
    planted = peak("zero2", weights=670, buckets=10_000, activations=12_000, master=500)
    planted |= {"observed__bucket_elements": 5 * 10**9, "promised": SCRIPT | {"stage": 3}}
    costs = ["activations_dominate", "buckets_dominate", "second_bucket"]
    assert found(record("zero2", **planted)) == ["other_stage", *costs]


def test_a_good_run_has_no_findings(capsys, golden):
    command.diagnose((RUNS / RECORDS["zero2"],))
    golden("command_diagnose.txt", capsys.readouterr().out)
    assert found(record("zero2")) == []


def test_what_a_record_does_not_hold_is_not_judged():
    bare = Record(run_id="mine", started_utc="2026-01-02T03:04:05+00:00")
    assert diagnose(bare) == []
    assert {"clipping", "activations", "traffic"} <= set(unknown_rules(bare))
    assert "activations" not in unknown_rules(record("zero2"))


def test_the_published_script_never_engaged_deepspeed():
    """Records as they are: nothing is planted. The repaired script did engage it."""
    runs = [store.load(path.parent) for path in RUNS.glob("as_printed/*/record.json")]
    by_repair = {run.requested.repair: "deepspeed_off_in_published_script" in found(run) for run in runs}
    assert by_repair["none"]
    assert not by_repair["engaged"]


def test_why_a_run_is_not_done_is_told(tmp_path, capsys):
    error = {"kind": "RuntimeError", "message": "another rank died", "what_to_do": "look in the launcher's output"}
    store.write(tmp_path, record("ddp", status="failed", error=error))
    command.diagnose((tmp_path,))
    assert "another rank died. What to do: look in the launcher's output." in capsys.readouterr().out


def test_of_a_folder_of_runs_the_runs_are_named(tmp_path):
    put(tmp_path, finished("first"), finished("second"))
    with pytest.raises(Stop, match="holds runs, and is none itself") as stopped:
        command.diagnose((tmp_path,))
    assert stopped.value.remedy == "name one of its runs (2): first, second"


EVERYDAY = {  # what tests/everyday.py plants, and the findings of each
    "right": set(),
    "right_by_hand": set(),
    "accumulate_unused": {"accumulate_unused"},
    "cleared": {"gradients_cleared", "no_sync_unused"},
    "no_sync": {"no_sync_unused"},
    "unprepared": {"gradients_not_shared"},
    "same_rows": {"same_rows"},
    "unequal_rows": {"unequal_rows"},
    "divided_twice": {"loss_divided_twice"},
    "oom": set(),
}


@pytest.fixture(scope="module")
def everyday(tmp_path_factory):
    """The records of one real launch on two ranks, which trains once with each mistake."""
    folder = tmp_path_factory.mktemp("everyday")
    config = "accelerate_configs/ddp.yaml"
    words = [str(folder), *EVERYDAY]
    launched = forked(folder, config=config, launcher=(), script="tests/everyday.py", flags=words)
    assert launched.code == 0, launched.output
    return folder


def test_everyday_mistakes_are_found_in_a_real_run_and_nothing_else(everyday):
    assert {name: set(found(store.load(everyday / name))) for name in EVERYDAY} == EVERYDAY


def test_a_launcher_that_wrapped_nothing_gets_the_right_remedy(tmp_path):
    config = "accelerate_configs/ddp.yaml"
    words = [str(tmp_path), "no_wrap"]
    assert forked(tmp_path, config=config, launcher=(), script="tests/everyday.py", flags=words).code == 0
    first, second = diagnose(store.load(tmp_path / "no_wrap"))
    assert (first.id, second.id) == ("no_wrap", "same_rows")
    assert "`use_cpu: true`" in first.remedy


@pytest.mark.parametrize("name", [name for name, ids in EVERYDAY.items() if ids])
def test_diff_of_a_wrong_run_against_the_right_one_names_the_mistake(everyday, name):
    compared = command.diff(everyday / name, everyday / "right", as_json=True)
    assert ({each.id for each in compared["found_in_a"]}, compared["found_in_b"]) == (EVERYDAY[name], [])


def test_memory_that_was_full_in_step_0_says_what_was_held_and_what_to_ask(everyday, capsys):
    run = store.load(everyday / "oom")
    assert run.status == "oom"
    assert "unallocated.); this rank then held weights 8.71 kB" in run.error.message
    command.diagnose((everyday / "oom",))
    printed = " ".join(capsys.readouterr().out.split())
    assert "The memory was full" in printed
    assert "--model MODEL --arm ddp --ranks 2` names the tensor" in printed


def test_findings_are_ordered_by_size():
    sizes = [
        {"traffic_bytes": 9}, {"memory_bytes": 1_580_000}, {"lost_s": 0.01}, {"memory_bytes": 52_400_000}, {},
        {"lost_s": 0.5},
    ]  # fmt: skip
    ids = [each.id for each in ordered([Finding("", id=str(place), **size) for place, size in enumerate(sizes)])]
    assert ids == ["4", "5", "2", "3", "1", "0"]


def test_full_memory_comes_first_and_a_key_that_deepspeed_ignored_is_named(tmp_path):
    config = {"gradient_acumulation_steps": 4, "zero_optimization": {"stage": 2}}
    error = {"kind": "OutOfMemoryError", "message": CUDA_ERROR, "what_to_do": "take fewer rows"}
    put(tmp_path, changed(finished("full", "zero2"), status="oom", error=error, observed__deepspeed=config))
    (answer,) = command.diagnose((tmp_path / "full",), as_json=True)
    first, second, *_ = answer["findings"]
    assert (first["id"], second["id"]) == ("memory_full", "key_ignored")
    assert second["remedy"] == "write gradient_accumulation_steps"
