"""`study diff`: configs and records of any kind, anybody's: known causes first, nothing trusted."""

import json
from pathlib import Path

import pytest
import yaml

from study.cli.diagnosis import diff
from study.core.errors import Stop
from study.watch import sources
from study.watch.differences import compare, mistakes

ROOT = Path(__file__).resolve().parents[1]
ARMS = ROOT / "accelerate_configs"
RUNS = ROOT / "reports/cpu-2core/runs"

PLAIN = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
DDP = {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16", "num_processes": 8}
ZERO = {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "num_processes": 8}
TRAINER = {
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
}


@pytest.fixture
def file(tmp_path):
    """Writes settings to a file, as json or yaml by its name."""

    def write(name: str, content: dict) -> Path:
        path = tmp_path / name
        path.write_text(json.dumps(content) if name.endswith("json") else yaml.safe_dump(content))
        return path

    return write


def known(a: Path, b: Path) -> dict[str, tuple]:
    compared = compare(sources.read(a), sources.read(b))
    return {each.name: (each.a.value, each.b.value) for each in compared if each.description}


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (ZERO, DDP, {"clipping": (1.0, None), "precision": ("cast to bfloat16", "autocast to bfloat16"),
                     "engine": ("DeepSpeed", "DDP")}),
        (ZERO | {"deepspeed_config": {"gradient_clipping": 0.0, "zero_stage": 3}},  # Accelerate drops the 0
         ZERO | {"deepspeed_config": {"gradient_clipping": -1.0, "zero_stage": 3}}, {"clipping": (1.0, -1.0)}),
        (PLAIN, PLAIN | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
         {"offload_optimizer": ("none", "cpu")}),  # that is what stage 2 does
        (PLAIN | {"bf16": {"enabled": True}}, PLAIN | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
         {"precision": ("cast to bfloat16", "autocast to bfloat16")}),
        (PLAIN, PLAIN | {"zero_optimization": {"stage": 2, "cpu_offload": True}},
         {"offload_optimizer": ("none", "cpu")}),
        (DDP, DDP | {"fsdp_config": {"fsdp_offload_params": True}}, {}),  # of another distributed_type: not read
        (PLAIN, PLAIN | {"zero_optimization": {"stage": 3}}, {"stage": (2, 3), "overlap_comm": (False, True)}),
        (TRAINER, TRAINER | {"deepspeed": PLAIN},
         {"clipping": (0.5, 1.0), "engine": ("DDP, or one process", "DeepSpeed")}),
        (TRAINER, TRAINER | {"deepspeed": PLAIN | {"gradient_clipping": "auto"}},
         {"engine": ("DDP, or one process", "DeepSpeed")}),
        (TRAINER | {"learning_rate": "1e-5"}, TRAINER | {"learning_rate": 1e-05}, {}),
        (TRAINER | {"bf16": True}, TRAINER, {"precision": ("autocast to bfloat16", "fp32")}),
        ({"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": {"fsdp_version": 2}}, DDP,
         {"engine": ("FSDP", "DDP")}),
        (PLAIN | {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
         PLAIN | {"optimizer": {"type": "Adam"}},
         {"adam_w_mode": (False, None)}),
    ],
)  # fmt: skip
def test_known_causes(file, a, b, expected):
    assert known(file("a.json", a), file("b.yaml", b)) == expected


def test_what_the_command_prints(file, tmp_path, capsys, monkeypatch, golden):
    """Clipping comes first, with its history; secrets and control characters are not shown; a json that a yaml names
    is read, or named if it is not here."""
    monkeypatch.chdir(tmp_path)
    other = TRAINER | {"group_by_length": True, "hub_token": "hf_mine", "note": "\x1b[31mred"}
    twice = TRAINER | {"deepspeed": PLAIN | {"gradient_accumulation_steps": 4}}
    pairs = [
        (PLAIN, PLAIN | {"gradient_clipping": 0.0}),
        (ZERO | {"deepspeed_config": {"deepspeed_config_file": "a.json"}},
         ZERO | {"deepspeed_config": {"deepspeed_config_file": "elsewhere.json"}}),
        (twice, TRAINER | {"gradient_accumulation_steps": 1}),
        (DDP, {"nothing": None}),
        (other, TRAINER | {"group_by_length": False, "hub_token": "x", "note": "plain"}),
    ]  # fmt: skip
    for a, b in pairs:
        name = "a.yaml" if "distributed_type" in a else "a.json"
        file(name, a)
        file("b.yaml", b)
        diff(Path(name), Path("b.yaml"))
    printed = capsys.readouterr().out
    assert "hf_mine" not in printed + json.dumps(diff(Path("a.json"), Path("b.yaml"), as_json=True))
    assert "\x1b" not in printed
    assert max(map(len, printed.splitlines())) <= 100
    golden("command_diff.txt", printed)


BATCH = PLAIN | {"train_batch_size": 64, "gradient_accumulation_steps": 4}
AUTO = {"gradient_clipping": 0.5, "gradient_accumulation_steps": "auto"}
ON_PARAM = {"stage": 2, "offload_param": {"device": "cpu"}}
YAML_ALONE = ZERO | {"mixed_precision": None}


MISTAKES = [  # a config, the DeepSpeed json that it names, and what is wrong
    (PLAIN | {"zero_optimization": ON_PARAM}, None, "offload_param_needs_stage_3"),
    (PLAIN | {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, None, "no_nvme_path_written"),
    (YAML_ALONE, BATCH, None),
    (DDP | {"deepspeed_config": {"zero_stage": 3}}, None, "section_unused"),
    (ZERO | {"deepspeed_config": {"offload_param_device": "cpu"}}, None, "offload_param_needs_stage_3"),
    (PLAIN | {"zero_optimization": {"stage": 2, "offload_optimiser": {"device": "cpu"}}}, None, "key_mistyped"),
    (YAML_ALONE | {"deepspeed_config": {"zero_stag": 3}}, None, "key_mistyped"),
    (YAML_ALONE, PLAIN | {"zero_optimization": {"stage": 2, "overlap_com": True}}, "key_mistyped"),
    ({"distributed_type": "MULTI_GPU", "num_proceses": 2}, None, "key_mistyped"),
    (TRAINER | {"learning_rte": 1e-05}, None, "key_mistyped"),
    (TRAINER, PLAIN | AUTO, None),
]  # fmt: skip


@pytest.mark.parametrize(("content", "deepspeed", "found"), MISTAKES)
def test_what_a_library_ignores_in_a_config_is_found_although_nothing_differs(file, content, deepspeed, found):
    if deepspeed is not None:
        file("ds.json", deepspeed)
        named = {"deepspeed": "ds.json"} if "output_dir" in content else {}
        content = content | (named or {"deepspeed_config": {"deepspeed_config_file": "ds.json"}})
    ids = [each.id for each in mistakes(sources.read(file("mine.yaml", content)))]
    assert ids == [found] * (found is not None)


def test_records_and_mixed_kinds():
    a, b = RUNS / "smoke/arms-zero2-5228df76-r1.1", RUNS / "stages/precision-zero3-29137077-r1.1"
    causes = known(a, b)
    assert causes["precision"] == ("fp32", "autocast to bfloat16")
    assert causes["stage"] == (2, 3)
    assert next(iter(causes)) == "data"
    assert known(a, ARMS / "zero2.yaml") == {}
    assert known(a / "record.json", ARMS / "deepspeed/zero3_cpu.json").keys() == {
        "stage", "offload_optimizer", "offload_param",
    }  # fmt: skip
    assert diff(a, b, as_json=True)["known"][0]["name"] == "data"


def test_our_configs_have_no_mistakes():
    paths = [path for path in ARMS.rglob("*") if path.suffix in (".yaml", ".json")]
    assert len(paths) > 40
    assert [each for path in paths for each in mistakes(sources.read(path))] == []


@pytest.mark.parametrize("content", [b"", b"!!python/object/apply:os.system ['echo no']", b"a: 1\n" * 1_000_000])
def test_a_file_that_is_no_config_is_refused_and_nothing_runs(tmp_path, content):
    (tmp_path / "bad.yaml").write_bytes(content)
    with pytest.raises(Stop, match=r"bad\.yaml"):
        sources.read(tmp_path / "bad.yaml")
