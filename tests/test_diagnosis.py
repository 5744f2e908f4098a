"""Findings: each planted mistake is named with its numbers, and a record without it does not have the finding."""

import ast
import functools
import json
from pathlib import Path

import pytest

import study.watcher
from study.cli import diagnosis as command
from study.cli.diagnosis import REPRODUCTIONS
from study.ledger import files
from study.records import store
from study.records.schema import Record
from study.watcher.findings import CHECKS, diagnose, looked_at

RUNS = Path(__file__).resolve().parents[1] / "reports/cpu-2core/runs"
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


def found(of: Record) -> list[str]:
    return [finding.sentence for finding in diagnose(of)]


def peak(name: str, **components: int) -> dict:
    """Changes with which each rank has these components at its peak, in MB."""
    ranks = len(record(name).memory.components.per_rank)
    held = {role: size * 10**6 for role, size in components.items()}
    each = {"at_peak": held, "after_step": held, "tracked_peak_bytes": sum(held.values())}
    return {"memory__components__per_rank": [each] * ranks}


def moved(kind: str, nbytes: int) -> dict:
    return {kind: {"calls": 3, "bytes": nbytes, "bytes_by_dtype": {"float32": nbytes}}}


PLANTED = [  # record, the change that is the mistake, what is said, what shows it
    ("ddp", {"promised": SCRIPT},
     "DeepSpeed is not on: mine.yaml asks for it with ZeRO stage 2, and what trains is a DistributedDataParallel",
     "deepspeed_set_later"),
    ("zero2", {"promised": SCRIPT | {"stage": 3}}, "ZeRO's stage is 2 although mine.yaml says 3", "L-39"),
    ("ddp", {"promised": {"source": "mine.yaml", "fsdp": True}},
     "FSDP is not on: mine.yaml asks for it, and what trains is a DistributedDataParallel", "fsdp_on_a_cpu_is_ddp"),
    ("single", {"promised": {"ranks": 2}}, "2 processes were started, and each trains alone",
     "two_trainings_without_gpu"),
    ("ddp", {"traffic__per_rank": [moved("all_reduce", 8)] * 2},
     "The 2 ranks do not share their gradients: a step reduces 8 bytes", "two_trainings_without_gpu"),
    ("zero2", {"promised": SCRIPT | {"clipping": 0.0}, "observed__clipping": 1.0},
     "Clipping is 1 although mine.yaml says 0: Accelerate drops a value of 0", "clipping_zero_from_yaml"),
    ("zero2", {"promised": SCRIPT, "observed__clipping": 1.0},
     "Gradients are clipped at 1 although nothing asks for it: DeepSpeed's default is 1.0 since June 2026", "L-15"),
    ("zero2", {"promised": SCRIPT | {"clipping": 0.25}, "observed__clipping": 1.0},
     "Clipping is 1 although mine.yaml says 0.25", "max_grad_norm_unused"),
    ("zero2", {"watched": {"clip_grad_norm": 0.5}},
     "Clipping is 0 although the script calls clip_grad_norm_ with 0.5", "clip_grad_norm_ignores_its_norm"),
    ("ddp", {"promised": {"clipping": 1.0}}, "Clipping is 0 although the script says 1", "L-56"),
    ("zero2", {"promised": SCRIPT | {"accumulation": 4}},
     "Accumulation is set twice: mine.yaml says 4 passes a step, and 1 is what counts",
     "accumulation_not_from_accelerator"),
    ("zero2", {"promised": SCRIPT | {"precision": "bf16"}},
     "bf16 is a cast here, not autocast: the weights are bfloat16, and so is the loss", "bf16_is_two_recipes"),
    ("ddp", {"promised": {"precision": "bf16"}}, "Precision is fp32 although the script says bf16", None),
    ("ddp", {"promised": {"weights": "bfloat16"}},
     "The model was loaded in bfloat16 and is trained in float32: its weights take 3.16 MB instead of 1.58 MB", None),
    ("single", {"observed__dtypes": {"weights": "bfloat16", "moments": "bfloat16", "master": None}},
     "The optimizer updates bfloat16 weights without an fp32 copy", None),
    ("zero2 bf16", {"observed__autocast": "fp16", "observed__loss_scale": 65536.0},
     "The loss scale is still 65536: under fp16 autocast DeepSpeed never lowers it",
     "autocast_fp16_never_lowers_its_scale"),
    ("zero2", {"observed__stage": 0}, "Stage 0 with bf16 takes an empty Adam step first", "bf16_first_step"),
    ("zero2", {"promised": SCRIPT | {"offload_optimizer": "nvme"}, "observed__offload_optimizer": "cpu"},
     "Stage 2 takes `nvme` for `cpu`: the optimizer states are in host memory", "stage2_nvme_writes_nothing"),
    ("zero2", {"promised": SCRIPT | {"offload_optimizer": "cpu"}},
     "The optimizer states are offloaded to none although cpu is asked for", "L-02"),
    ("zero2", {"promised": SCRIPT | {"offload_param": "cpu"}},
     "The weights are not offloaded although cpu is asked for: stage 2 ignores offload_param",
     "offload_param_without_stage3"),
    ("zero3_nvme", {"observed__deepspeed__zero_optimization__offload_optimizer__nvme_path": "none"},
     "The files of offload_optimizer go to ./none", "nvme_path_from_yaml"),
    ("zero3", {"observed__second_partition_ranks": 8, "observed__second_partition_parameters": 42_000_000},
     "hpZ makes a second copy of the weights, 84 MB on each rank, and nothing is gathered from it", "P4-14"),
    ("zero3_nvme", {"memory__per_rank": [{"nvme_written_bytes": 8192}] * 2},
     "Nothing was swapped to the disk: DeepSpeed keeps partitions under 1 MiB in memory", "L-02"),
    ("zero2", {"promised": SCRIPT | {"optimizer": "SGD"}, "observed__optimizer": "DeepSpeedCPUAdam"},
     "The optimizer is DeepSpeedCPUAdam although the script creates SGD", "sgd_becomes_adam"),
    ("zero2", {"observed__deepspeed__zero_optimization__zenflow": {"topk_ratio": 0.1}},
     "ZenFlow is on: in stages 1 and 2 DeepSpeed 0.19.8 overwrites", "zenflow_changes_weights"),
    ("zero2", {"promised": SCRIPT | {"checkpointing": True}},
     "Activation checkpointing is not active although mine.yaml asks for it", "P1-26"),
    ("zero2", {"observed__dtypes": {"weights": "float32", "master": "float32", "moments": "float32"}},
     "Optimizer states hold fp32 copies of fp32 weights: 83.8 MB on a rank", "S002-43"),
    ("zero2", {"observed__bucket_elements": 5 * 10**9} | peak("zero2", weights=670, buckets=10_000),
     "Buckets of 10 GB hide the 4.4 GB that stage 2 saves on a rank", "L-35"),
    ("zero2", {"observed__overlap": True} | peak("zero2", weights=670, buckets=400),
     "overlap_comm keeps two buckets instead of one: 200 MB more", "overlap_comm_buffers"),
    ("zero3 many passes", peak("zero3 many passes", gathered_weights=4, weights=2, activations=3),
     "At its peak stage 3 holds all weights gathered, 4 MB", "L-09"),
    ("zero3", peak("zero3", gathered_weights=400, weights=42),
     "Stage 3 keeps 400 MB of 670 MB of weights whole between steps", "L-09"),
    ("zero3", {"observed__held_parameters_per_rank": [100_000_000]},
     "A rank holds 30% of the parameters instead of 6%: not all are partitioned", "S003-38"),
    ("zero2", peak("zero2", activations=600, weights=500), "Activations are 600 MB of the 1.1 GB at the peak", "P1-26"),
    ("zero2", {"observed__ranks": 1, "observed__ranks_counted": 1},
     "On one rank stage 2 partitions nothing", "S002-16"),
    ("ddp", peak("ddp", weights=30, moments=60, gradients=30, activations=80),
     "Each of the 2 ranks holds all 120 MB of model states", "S001-84"),
    ("zero3", {"observed__accumulation": 4, "requested__accumulation": 4,
               "traffic__per_rank": [moved("all_gather", 12 * 670_287_876)]},
     "Stage 3 gathers all weights 12 times in a step (8.04 GB) because accumulation is 4", "P1-20"),
    ("zero2", {"observed__accumulation": 4, "requested__accumulation": 4,
               "traffic__per_rank": [moved("all_reduce", 4 * 670_287_876)]},
     "Stage 2 reduces all gradients 4 times in a step (2.68 GB): after each of the 4 passes", "L-34"),
    ("script", {"observed__runs__0__arguments_say_deepspeed": True},
     "DeepSpeed is not on: the arguments of standard name it", "S002-25"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "says", "evidence"), PLANTED, ids=[case[2][:50] for case in PLANTED])
def test_a_planted_mistake_is_named(name, changes, says, evidence):
    findings = [each for each in diagnose(record(name, **changes)) if each.sentence.startswith(says)]
    assert [each.evidence for each in findings] == [evidence]
    assert findings[0].remedy
    assert not any(sentence.startswith(says) for sentence in found(record(name)))


def test_each_finding_is_planted_and_what_shows_it_exists():
    sources = [ast.parse(path.read_text()) for path in Path(study.watcher.__file__).parent.glob("*.py")]
    calls = [node for source in sources for node in ast.walk(source) if isinstance(node, ast.Call)]
    findings = [call.args for call in calls if getattr(call.func, "id", None) == "Finding"]
    named = {arguments[2].value for arguments in findings if len(arguments) == 3}
    assert named == {evidence for *_, evidence in PLANTED if evidence}
    claims = {claim.id for claim in files.read_all()}
    assert all(evidence in claims or (REPRODUCTIONS / f"{evidence}.py").exists() for evidence in named)


def test_a_good_run_has_no_findings_and_says_what_was_looked_at(capsys):
    command.diagnose((RUNS / RECORDS["zero2"],))
    printed = capsys.readouterr().out
    assert "Nothing was found." in printed
    assert all(name in " ".join(printed.split()) for name in CHECKS)


def test_what_a_record_does_not_hold_is_not_judged():
    bare = Record(run_id="mine", started_utc="2026-01-02T03:04:05+00:00")
    assert diagnose(bare) == []
    assert "buckets" not in looked_at(bare)[0]
    assert "clipping" in looked_at(bare)[1]
    without = record("zero2", traffic__per_rank=[])
    assert "gradients reduced in a step" in looked_at(without)[1]


def test_the_published_script_never_engaged_deepspeed():
    """Records as they are: nothing is planted. The repaired script did engage it."""
    runs = [store.load(path.parent) for path in RUNS.glob("as_printed/*/record.json")]
    by_repair = {run.requested.repair: any("DeepSpeed is not on" in text for text in found(run)) for run in runs}
    assert by_repair["none"]
    assert not by_repair["engaged"]


def test_json_has_all_of_it():
    (answer,) = command.diagnose((RUNS / RECORDS["zero3 many passes"] / "record.json",), as_json=True)
    assert json.loads(json.dumps(answer)) == answer
    assert answer["status"] == "done"
    assert all(finding["sentence"] and finding["remedy"] for finding in answer["findings"])


def test_why_a_run_is_not_done_is_told(tmp_path, capsys):
    error = {"kind": "RuntimeError", "message": "another rank died", "what_to_do": "look in the launcher's output"}
    store.write(tmp_path, record("ddp", status="failed", error=error))
    command.diagnose((tmp_path,))
    assert "failed: another rank died. What to do: look in the launcher's output." in capsys.readouterr().out
    (answer,) = command.diagnose((tmp_path,), as_json=True)
    assert answer["error"]["message"] == "another rank died"
