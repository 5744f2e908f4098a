"""The arms: what each file says, exactly what sets siblings apart, and what is refused."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from study.core import arms
from study.core.errors import Stop
from study.training import setup

PATHS = arms.all_paths()
REPLICAS = "parallelism_config_dp_replicate_size"
SHARDS = "parallelism_config_dp_shard_size"
ON_DEEPSPEED = [name for name in PATHS if name.startswith("zero")]
FAIR = [name for name in arms.NAMES if name.startswith("zero")]

PRECISION = {"mixed_precision", "bf16", "fp16", "torch_autocast"}
GATHER, PREFETCH = "allgather_bucket_size", "stage3_prefetch_bucket_size"
OPTIMIZER, PARAM = "offload_optimizer.device", "offload_param.device"
SIBLINGS = tomllib.loads(Path(__file__).with_name("siblings.toml").read_text())


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
    ("zero3_ulysses", 3): "zero3_ulysses gives the same rows to groups of 2 ranks",
}


@pytest.mark.parametrize(("name", "ranks"), UNEVEN)
def test_groups_that_do_not_come_out_even_are_refused(name, ranks, tmp_path):
    """In a sentence, before anything starts."""
    mine = written(tmp_path, f"{FSDP}parallelism_config: {{{REPLICAS}: 3, {SHARDS}: 4}}")
    with pytest.raises(Stop, match=rf"{UNEVEN[name, ranks]} \(got {ranks}\)") as stop:
        arms.read((PATHS | {"mine": mine})[name]).sharing_ranks(ranks)
    assert stop.value.status == "unavailable"
    assert arms.read(mine).sharing_ranks(12) == 4


def written(folder: Path, text: str) -> Path:
    (folder / "mine.yaml").write_text(text)
    return folder / "mine.yaml"


def with_json(folder: Path, text: str) -> Path:
    (folder / "mine.json").write_text(text)
    return written(folder, f"{ZEROS}{{deepspeed_config_file: {folder / 'mine.json'}}}")


ZEROS = "distributed_type: DEEPSPEED\ndeepspeed_config: "
SINGLE = "distributed_type: 'NO'\n"
FSDP = """distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_reshard_after_forward: true,
  fsdp_cpu_ram_efficient_loading: false, fsdp_offload_params: false}
"""
PROMISED = [  # stage, clipping, optimizer states, weights; what is left out is as the libraries have it by default
    (written, ZEROS + "{gradient_clipping: 0, offload_optimizer_device: cpu}", (2, 0.0, "cpu", "none")),
    (written, ZEROS + "{zero_stage: 3, offload_param_device: nvme}", (3, 1.0, "none", "nvme")),
    # Accelerate's own questionnaire writes such lines.
    (written, ZEROS + "{offload_optimizer_nvme_path: none, offload_param_nvme_path: null}", (2, 1.0, "none", "none")),
    (with_json, '{"gradient_clipping": "auto"}', (0, 1.0, "none", "none")),
]


@pytest.mark.parametrize(("write", "text", "promised"), PROMISED)
def test_a_file_of_somebody_else_is_read_as_accelerate_and_deepspeed_read_it(tmp_path, write, text, promised):
    arm = arms.read(write(tmp_path, text))
    assert (arm.stage, arm.clipping, arm.offload_optimizer, arm.offload_param) == promised
    assert arm.num_processes == 1
    assert arm.uses_nvme == ("nvme" in promised)


def test_a_json_is_found_from_any_folder(tmp_path, monkeypatch):
    """The path in a yaml is as seen from the root of the repository, wherever one stands."""
    monkeypatch.chdir(tmp_path)
    assert arms.read(PATHS["zero3"]).stage == 3
    (tmp_path / "here.json").write_text("{}")
    assert arms.find("here.json").read_text() == "{}", "and what is here comes first"


NVME = "remove it and give --nvme-dir"
KINDS = "distributed_type must be 'NO', 'MULTI_GPU', 'DEEPSPEED' or 'FSDP'"
FILE = "correct deepspeed_config_file in mine.yaml, or run from the root of the repository"
REFUSED = [
    (written, ZEROS + "{offload_optimizer_nvme_path: /disk}", "nvme_path must be 'none' (got '/disk')", NVME),
    (written, SINGLE + "mixed_precision: bf16", "precision must be 'no' (got 'bf16')", "give --precision"),
    (written, "- a list", "mine.yaml: must be a table (got ['a list'])", "fix mine.yaml"),
    (written, "distributed_type: NO", f"{KINDS} (got False)", "write 'NO' in quotes"),
    (written, FSDP.replace("fsdp_off", "fsdp_act"), "fsdp_offload_params is missing", "fix mine.yaml"),
    (written, SINGLE + "num_processes: 0", "num_processes must be greater than 0 (got 0)", "fix mine.yaml"),
    (written, f"{FSDP}parallelism_config: {{x: 5}}", "parallelism_config x is not known", "fix mine.yaml"),
    (written, f"{SINGLE}parallelism_config: {{x: 1}}", "parallelism_config needs FSDP or DeepSpeed", "fix mine.yaml"),
    (written, ZEROS + "{deepspeed_config_file: nowhere/absent.json}", "cannot be read (No such file", FILE),
    (written, ZEROS + "{zero_stage: 7}", "stage must be 0, 1, 2 or 3 (got 7)", "fix mine.yaml"),
    (with_json, '{"zero_optimization": 3}', "zero_optimization must be a table (got 3)", "fix mine.json"),
]


@pytest.mark.parametrize(("write", "text", "what", "remedy"), REFUSED, ids=lambda value: str(value)[:20])
def test_a_bad_file_is_refused(tmp_path, write, text, what, remedy):
    with pytest.raises(Stop, match=re.escape(what)) as caught:
        arms.read(write(tmp_path, text))
    assert remedy in caught.value.remedy
