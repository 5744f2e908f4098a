"""The arms: what each file says, exactly what sets siblings apart, and what is refused."""

import json
import re
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from study.core import arms
from study.core.errors import Stop
from study.training import setup
from tests.conftest import table

PATHS = arms.all_paths()
ON_DEEPSPEED = [name for name in PATHS if name.startswith("zero")]
FAIR = [name for name in arms.NAMES if name.startswith("zero")]

PRECISION = {"mixed_precision", "bf16", "fp16", "torch_autocast"}
GATHER, PREFETCH = "allgather_bucket_size", "stage3_prefetch_bucket_size"
OPTIMIZER, PARAM = "offload_optimizer.device", "offload_param.device"
SIBLINGS = table("core/siblings.toml")
FILES = table("core/arm_files.toml")


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
    """No file in the folders is left out, and each arm has a sibling."""
    assert list(PATHS)[: len(arms.NAMES)] == list(arms.NAMES)
    unseen = {path.relative_to(arms.ROOT) for path in arms.FOLDER.rglob("*.yaml")} - {
        path.relative_to(arms.ROOT) for path in PATHS.values()
    }
    assert not unseen, f"no command sees {unseen}: its name is missing in NAMES of study/core/arms.py"
    assert set(PATHS.values()) == set(arms.FOLDER.rglob("*.yaml"))
    named = {arms.ROOT / yaml_of(name)["deepspeed_config"]["deepspeed_config_file"] for name in ON_DEEPSPEED}
    assert named == set(arms.FOLDER.rglob("*.json"))
    assert {*" ".join(SIBLINGS).split()} == {*PATHS}
    assert not {key.rpartition(".")[2] for name in PATHS for key in merged(name)} & PRECISION


@pytest.mark.parametrize("name", PATHS)
def test_accelerate_loads_it(name):
    """Accelerate's own loader takes the file, and reads in it what is written there."""
    loaded, written = load_config_from_file(str(PATHS[name])).to_dict(), yaml_of(name)
    assert {key: loaded[key] for key in written} == written


@pytest.mark.parametrize("pair", SIBLINGS)
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


@pytest.mark.parametrize("name", PATHS)
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


@pytest.mark.parametrize("case", FILES["refused"])
def test_a_bad_file_is_refused(tmp_path, case):
    with pytest.raises(Stop, match=re.escape(case["what"])) as caught:
        arms.read(written(tmp_path, **case["file"]))
    assert case["remedy"] in caught.value.remedy
