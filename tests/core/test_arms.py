"""The arms: what each file says, exactly what sets siblings apart, and what is refused."""

import json
import re
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from study.core import arms, ignored_keys
from study.core.errors import Stop
from study.core.files import from_toml
from study.core.library_defaults import library_defaults
from study.training import setup
from tests.cases import for_each
from tests.conftest import DECODERS_ALONE, python, table

PATHS = arms.all_paths()
ON_DEEPSPEED = [name for name in PATHS if name.startswith("zero")]
FAIR = [name for name in arms.NAMES if name.startswith("zero")]

PRECISION = {"mixed_precision", "bf16", "fp16", "torch_autocast"}
GATHER, PREFETCH = "allgather_bucket_size", "stage3_prefetch_bucket_size"
OPTIMIZER, PARAM = "offload_optimizer.device", "offload_param.device"
SIBLINGS = table("core/siblings.toml")
FILES = table("core/arm_files.toml")
TRUTH = table("training/truth.toml")["is"]
COLOURS = from_toml((arms.PACKAGE / "report/colours.toml").read_bytes())["arms"]
SMOKE = (arms.PACKAGE / "sweeps/protocols/smoke.toml").read_text()


def yaml_of(name: str) -> dict:
    return yaml.safe_load(PATHS[name].read_text())


def json_of(name: str) -> dict:
    return json.loads((arms.ROOT / yaml_of(name)["deepspeed_config"]["deepspeed_config_file"]).read_text())


def flat(config: dict, above: str = "") -> dict:
    keys = {}
    for key, value in config.items():
        keys |= flat(value, f"{above}{key}.") if isinstance(value, dict) else {above + key: value}
    return keys


def merged(name: str) -> dict:
    """Everything an arm says, yaml and json in one, by key; of DeepSpeed's sections without their names."""
    config = yaml_of(name)
    deepspeed = config.pop("deepspeed_config", {})
    if deepspeed:
        deepspeed |= json_of(name)
        del deepspeed["deepspeed_config_file"]
    zero = deepspeed.pop("zero_optimization", {})
    assert not config.keys() & deepspeed.keys() | zero.keys() & {*config, *deepspeed}, "no key is there twice"
    return flat(config | deepspeed | zero)


# --- the files -----------------------------------------------------------------------------------------------------


def test_these_are_the_arms():
    """No file in the folders is left out, and each arm has a sibling. All places that lack one are told at once."""
    told = []
    for path in sorted({*arms.FOLDER.rglob("*.yaml")} - {*PATHS.values()}):
        told.append(f"no command sees {path.name}: add {path.stem!r} to NAMES of study/core/arms.py")
    for name in [name for name in arms.NAMES if not PATHS[name].is_file()]:
        told.append(f"NAMES of study/core/arms.py has {name!r}: add {name}.yaml to accelerate_configs/")
    there = {path.stem for path in arms.FOLDER.rglob("*.yaml")}
    paired = {*" ".join(SIBLINGS).split()}
    for name in sorted(there - paired):
        told.append(f"{name} has no sibling: add its difference from the most similar arm to tests/core/siblings.toml")
    for name in sorted(paired - there):
        told.append(f"tests/core/siblings.toml has {name!r}, and accelerate_configs/ has no such file")
    listed = {path.stem for path in arms.FOLDER.glob("*.yaml")}
    for name in sorted(listed - {*COLOURS}):
        told.append(f"{name} has no colour: add one to study/report/colours.toml")
    for name in sorted(listed - {*TRUTH} - {*DECODERS_ALONE}):
        told.append(f"add {name} to [is] of tests/training/truth.toml, or to DECODERS_ALONE of tests/conftest.py")
    for name in [name for name in sorted(listed) if f'"{name}"' not in SMOKE]:
        told.append(f"no part trains {name}: add it to study/sweeps/protocols/smoke.toml")
    assert not told, "\n".join(told)
    jsons = {arms.ROOT / yaml_of(name)["deepspeed_config"]["deepspeed_config_file"] for name in ON_DEEPSPEED}
    unused = {path.name for path in arms.FOLDER.rglob("*.json")} - {path.name for path in jsons}
    assert not unused, f"no yaml of accelerate_configs/ names {unused} in deepspeed_config_file"
    assert jsons == {*arms.FOLDER.rglob("*.json")}
    assert not {key.rpartition(".")[2] for name in PATHS for key in merged(name)} & PRECISION


@pytest.mark.parametrize("name", PATHS)
def test_accelerate_loads_it(name):
    """Accelerate's own loader takes the file, and reads in it what is written there."""
    loaded, written = load_config_from_file(str(PATHS[name])).to_dict(), yaml_of(name)
    assert {key: loaded[key] for key in written} == written


@for_each("pair", SIBLINGS)
def test_siblings_differ_by_a_named_delta(pair):
    a, b = map(merged, pair.split())
    assert {key for key in a.keys() | b.keys() if a.get(key, "absent") != b.get(key, "absent")} == {*SIBLINGS[pair]}


@pytest.mark.parametrize("name", FAIR)
def test_fair_buckets_are_as_large_as_ddps(name):
    """25 MiB of fp32, which is what the trainer gives DDP."""
    zero = json_of(name)["zero_optimization"]
    assert zero["reduce_bucket_size"] * 4 == setup.BUCKET_MIB * 2**20 == 26_214_400
    assert zero[PREFETCH if zero["stage"] == 3 else GATHER] * 4 == 26_214_400
    assert zero["overlap_comm"] is True, "as DDP does"


# --- what is read from them ----------------------------------------------------------------------------------------


@for_each("name", PATHS)
def test_an_arm_is_what_its_files_promise(name):
    arm, said = arms.read(PATHS[name]), merged(name)
    home = "cpu" if said.get("fsdp_config.fsdp_offload_params") else "none"
    assert arm.name == name
    assert arm.stage == (int(name[4]) if name in ON_DEEPSPEED else None)
    assert (arm.offload_optimizer, arm.offload_param) == (said.get(OPTIMIZER, home), said.get(PARAM, home))
    assert arm.uses_nvme == (name == "zero3_nvme")
    assert arm.clipping == 0.0, "left out, it would be 1.0"
    assert arm.num_processes == (1 if name == "single" else "auto")
    assert arm.deepspeed == (json_of(name) if name in ON_DEEPSPEED else None)
    assert arm.fsdp == yaml_of(name).get("fsdp_config")
    assert (arm.replicas, arm.shards) == ((2, "auto") if name == "hsdp" else (1, "auto"))
    assert arm.second_partition(4) == (2 if "hpz" in name else None)
    assert arm.sharing_ranks(4) == (2 if name == "hsdp" else 4)
    assert arm.sequence_ranks == (2 if name == "zero3_ulysses" else 1)
    assert arm.tensor_ranks == (2 if name.endswith("_tp") else 1)
    assert arm.row_ranks == arm.sequence_ranks * arm.tensor_ranks


UNEVEN = {
    ("hsdp", 2): "hsdp has 2 groups of ranks that share the weights, and needs 4 ranks",
    ("mine", 6): "mine has 3 groups of ranks that share the weights, and needs 12 ranks",
    ("zero3_hpz", 3): "zero3_hpz keeps a second copy of the weights in groups of 2 ranks",
    ("zero3_ulysses", 3): "zero3_ulysses gives the same sequences to groups of 2 ranks",
}


@pytest.mark.parametrize(("name", "ranks"), UNEVEN)
def test_groups_that_do_not_come_out_even_are_refused(name, ranks, tmp_path):
    """In a sentence, before anything starts."""
    mine = written(tmp_path, FILES["groups"])
    with pytest.raises(Stop, match=rf"{UNEVEN[name, ranks]} \(got {ranks}\)") as stop:
        arms.read((PATHS | {"mine": mine})[name]).sharing_ranks(ranks)
    assert stop.value.status == "unavailable"
    assert arms.read(mine).sharing_ranks(12) == 4


def written(folder: Path, yaml: str = FILES["deepspeed"], json: str = "") -> Path:
    """A file of somebody else, which may name a json."""
    (folder / "mine.json").write_text(json)
    (folder / "mine.yaml").write_text(yaml.replace("JSON", str(folder / "mine.json")))
    return folder / "mine.yaml"


@pytest.mark.parametrize("case", FILES["promised"])
def test_a_file_of_somebody_else_is_read_as_accelerate_and_deepspeed_read_it(tmp_path, case):
    arm = arms.read(written(tmp_path, **case["file"]))
    promised = [arm.stage, arm.clipping, arm.offload_optimizer, arm.offload_param]
    assert promised == case["promised"]
    assert arm.num_processes == 1
    assert arm.uses_nvme == ("nvme" in promised)


def test_a_json_is_found_from_any_folder(tmp_path, monkeypatch):
    """The path in a yaml is as seen from the root of the repository, wherever one stands."""
    monkeypatch.chdir(tmp_path)
    assert arms.read(PATHS["zero3"]).stage == 3
    (tmp_path / "here.json").write_text("{}")
    assert arms.find("here.json").read_text() == "{}", "and what is here comes first"


def test_a_json_beside_its_yaml_is_found_from_any_folder(tmp_path, monkeypatch):
    """Before one of the same name in the folder where one stands."""
    (tmp_path / "configs").mkdir()
    path = written(tmp_path / "configs", FILES["deepspeed"].replace("JSON", "mine.json"), stage_of(3))
    monkeypatch.chdir(tmp_path)
    assert arms.read(path).stage == 3
    (tmp_path / "mine.json").write_text(stage_of(1))
    assert arms.read(path).stage == 3
    (tmp_path / "configs/mine.json").unlink()
    assert arms.read(path).stage == 1, "without one beside it that of the current folder"
    assert arms.read(Path("configs/mine.yaml")).stage == 1


def stage_of(stage: int) -> str:
    return json.dumps({"zero_optimization": {"stage": stage}})


@pytest.mark.parametrize("case", FILES["followed"])
def test_a_file_that_is_corrected_as_told_has_no_second_message(case, tmp_path):
    with pytest.raises(Stop) as stop:
        arms.read(written(tmp_path, **case["before"]))
    assert not [line for line in case["lines"] if line not in stop.value.what], stop.value.what
    assert not [line for line in case.get("silent", ()) if line in stop.value.what], stop.value.what
    arms.read(written(tmp_path, **case["after"]))


def told_of(folder: Path, config: dict) -> str:
    """What is said of a DeepSpeed config; empty if it is an arm."""
    try:
        arms.read(written(folder, json=json.dumps(config)))
    except Stop as stop:
        return stop.what
    return ""


OF_ZERO = library_defaults("deepspeed")["zero_optimization"]
BEGIN = [key for key in OF_ZERO if key.startswith("stage3_")]
SHORT = [key for key in OF_ZERO if f"stage3_{key}" in BEGIN]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_each_key_of_stage_3_is_refused_of_the_others(tmp_path, stage):
    """Whatever its value, and if it is DeepSpeed's default."""
    wrong = []
    for key in [*BEGIN, *SHORT, *ignored_keys.OF_STAGE_3]:
        for value in (12345, OF_ZERO[key], "auto"):
            said = told_of(tmp_path, {"zero_optimization": {"stage": stage, key: value}})
            if f"stage {stage} ignores {key}: take stage 3" not in said:
                wrong.append(f"{key} = {value} with stage {stage}: {said or 'taken'}")
        said = told_of(tmp_path, {"zero_optimization": {"stage": 3, key: 12345}})
        if f"ignores {key}" in said:
            wrong.append(f"{key} with stage 3: {said}")
    assert wrong == []


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_key_that_deepspeed_does_not_know_is_refused_in_each_section(tmp_path, stage):
    wrong = []
    for section in library_defaults("deepspeed"):
        config: dict = {"zero_optimization": {"stage": stage}}
        part = config
        for name in filter(None, section.split(".")):
            part = part.setdefault(name, {})
        part["flux"] = 1
        said = told_of(tmp_path, config)
        if f"deepspeed has no key {f'{section}.flux'.lstrip('.')}: " not in said:
            wrong.append(f"flux in {section or 'the upper level'}: {said or 'taken'}")
    assert wrong == []


def test_files_are_read_without_the_libraries():
    """Whoever writes an arm may have neither."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'deepspeed', 'accelerate', 'transformers')))\n"
        "from study.core.arms import all_paths, load_arm\n"
        "print(len([load_arm(name) for name in all_paths()]))"
    )
    assert python("-c", code).stdout == f"{len(PATHS)}\n"


@for_each("case", FILES["refused"])
def test_a_bad_file_is_refused(tmp_path, case):
    with pytest.raises(Stop, match=re.escape(case["what"])) as caught:
        arms.read(written(tmp_path, **case["file"]))
    assert case["remedy"] in caught.value.remedy


@for_each("case", FILES["told"])
def test_all_that_is_wrong_with_an_arm_is_told_at_once(tmp_path, monkeypatch, case):
    """Each mistake once, in a line of its own: the first does not hide the others."""
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, **case["file"])
    told = [f"{mistake.file.name}: {mistake.said}" for mistake in arms.files_of(path).mistakes]
    json_path = str(tmp_path / "mine.json")
    expected = [line.replace("JSON", json_path) for line in case["lines"]]
    assert [line[: len(begin)] for line, begin in zip(told, expected, strict=True)] == expected
    with pytest.raises(Stop) as stop:
        arms.read(path)
    assert all(line.partition(": ")[2] in stop.value.what for line in told), "and each command refuses it by the same"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        *(
            (name, "zero3")
            for name in ("3", "stage3", "stage-3", "Stage 3", "zero-3", "zero_3", "ZeRO-3", "z3", "zero_stage3")
        ),
        ("1", "zero1"),
        ("stage2", "zero2"),
        ("stage3_offload", "zero3_cpu"),
        ("zero-3-nvme", "zero3_nvme"),
    ],
)
def test_a_stage_is_answered_with_its_arm(written, meant):
    with pytest.raises(Stop) as raised:
        arms.load_arm(written)
    assert f"did you mean {meant!r}?" in raised.value.remedy
