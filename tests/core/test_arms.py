"""The arms: what each file says, exactly what sets siblings apart, and what is refused."""

import json
import re

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
ENGINE = {"distributed_type", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"}
GROUPS = "parallelism_config.parallelism_config_"
SHIPPED = {"overlap_comm", "reduce_bucket_size"}
GATHER, PREFETCH = "allgather_bucket_size", "stage3_prefetch_bucket_size"
RELEASE = {f"stage3_{key}" for key in ("max_live_parameters", "max_reuse_distance", "param_persistence_threshold")}
ZENFLOW = {f"zenflow.{key}" for key in ("topk_ratio", "select_strategy", "select_interval", "update_interval")}
ZENFLOW |= {"zenflow.overlap_step", "optimizer.type", "optimizer.params.lr", "optimizer.params.weight_decay"}
OPTIMIZER, PARAM = "offload_optimizer.device", "offload_param.device"

SIBLINGS = [  # one arm, another, and every setting in which they differ
    ("single", "ddp", {"distributed_type", "num_processes", "main_process_port"}),
    ("ddp", "zero1", ENGINE | SHIPPED | {"stage", GATHER}),
    ("zero1", "zero2", {"stage"}),
    ("zero2", "zero3", {"stage", GATHER, PREFETCH, "stage3_gather_16bit_weights_on_model_save"}),
    ("zero1", "zero1_cpu", {OPTIMIZER}),
    ("zero2", "zero2_cpu", {OPTIMIZER}),
    ("zero3", "zero3_cpu", {OPTIMIZER, PARAM, "offload_param.pin_memory"}),
    ("zero3_cpu", "zero3_nvme", {OPTIMIZER, "offload_optimizer.nvme_path"}),
    ("zero1", "zero1_default", SHIPPED | {GATHER}),
    ("zero2", "zero2_default", SHIPPED | {GATHER}),
    ("zero3", "zero3_default", SHIPPED | {PREFETCH}),
    ("zero2", "zero2_reduce", {"use_multi_rank_bucket_allreduce"}),
    ("zero2", "zero2_small_buckets", {"reduce_bucket_size"}),
    ("zero3", "zero3_textbook", RELEASE | {PREFETCH}),
    ("zero3", "zero3_init_off", {"zero3_init_flag"}),
    ("zero3", "zero3_qwz", {"zero_quantized_weights"}),
    ("zero3", "zero3_qgz", {"zero_quantized_gradients"}),
    ("zero3", "zero3_deepcompile", {"compile.deepcompile"}),
    ("zero3", "zero3_superoffload", {OPTIMIZER, "offload_optimizer.pin_memory", "offload_optimizer.super_offload"}),
    ("zero3", "zero3_zenflow", {OPTIMIZER, "offload_optimizer.pin_memory"} | ZENFLOW),
    ("ddp", "fsdp2", {"distributed_type", *(f"fsdp_config.{key}" for key in arms.Fsdp.model_fields)}),
    ("fsdp2", "fsdp2_grad_op", {"fsdp_config.fsdp_reshard_after_forward"}),
    ("fsdp2", "fsdp2_cpu", {"fsdp_config.fsdp_offload_params"}),
    ("fsdp2", "hsdp", {f"{GROUPS}dp_replicate_size", f"{GROUPS}dp_shard_size"}),
    ("zero3", "zero3_hpz", {"zero_hpz_partition_size"}),
    ("zero3_textbook", "zero3_hpz_textbook", {"zero_hpz_partition_size"}),
    ("zero1", "zero1_tp", {"tensor_parallel.autotp_size"}),
    ("zero2", "zero2_tp", {"tensor_parallel.autotp_size"}),
    ("zero3", "zero3_ulysses", {f"{GROUPS}sp_size", f"{GROUPS}sp_backend"}),
]


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
    assert {name for pair in SIBLINGS for name in pair[:2]} == set(PATHS)
    assert not {key.rpartition(".")[2] for name in PATHS for key in merged(name)} & PRECISION


@pytest.mark.parametrize("name", PATHS)
def test_accelerate_loads_it(name):
    """Accelerate's own loader takes the file, and reads in it what is written there."""
    loaded, written = load_config_from_file(str(PATHS[name])).to_dict(), yaml_of(name)
    assert {key: loaded[key] for key in written} == written


@pytest.mark.parametrize(("one", "other", "differ"), SIBLINGS, ids=lambda name: name if isinstance(name, str) else "")
def test_siblings_differ_by_a_named_delta(one, other, differ):
    a, b = merged(one), merged(other)
    assert {key for key in a.keys() | b.keys() if a.get(key, "absent") != b.get(key, "absent")} == differ


@pytest.mark.parametrize("name", FAIR)
def test_fair_buckets_are_as_large_as_ddps(name):
    """25 MiB of fp32, which is what the trainer gives DDP."""
    zero = json_of(name)["zero_optimization"]
    assert zero["reduce_bucket_size"] * 4 == setup.BUCKET_MIB * 2**20 == 26_214_400
    assert zero[PREFETCH if zero["stage"] == 3 else GATHER] * 4 == 26_214_400
    assert zero["overlap_comm"] is True, "as DDP does"


# --- what is read from them ----------------------------------------------------------------------------------------

OFFLOADS = {  # optimizer states, weights; the others keep both on the device
    "zero1_cpu": ("cpu", "none"),
    "zero2_cpu": ("cpu", "none"),
    "zero3_cpu": ("cpu", "cpu"),
    "zero3_nvme": ("nvme", "cpu"),
    "fsdp2_cpu": ("cpu", "cpu"),
    "zero3_superoffload": ("cpu", "none"),
    "zero3_zenflow": ("cpu", "none"),
}


@pytest.mark.parametrize("name", PATHS)
def test_an_arm_is_what_its_files_promise(name):
    arm = arms.read(PATHS[name])
    assert arm.name == name
    assert arm.stage == (int(name[4]) if name in ON_DEEPSPEED else None)
    assert (arm.offload_optimizer, arm.offload_param) == OFFLOADS.get(name, ("none", "none"))
    assert arm.uses_nvme == (name == "zero3_nvme")
    assert arm.clipping == 0.0, "left out, it would be 1.0"
    assert arm.num_processes == (1 if name == "single" else "auto")
    assert arm.deepspeed == (json_of(name) if name in ON_DEEPSPEED else None)
    assert arm.fsdp == yaml_of(name).get("fsdp_config")
    assert (arm.fsdp is not None) == (name.startswith("fsdp2") or name == "hsdp")
    assert (arm.replicas, arm.shards) == ((2, "auto") if name == "hsdp" else (1, "auto"))
    assert arm.second_partition(4) == (2 if "hpz" in name else None)
    assert arm.sharing_ranks(4) == (2 if name == "hsdp" else 4)
    assert arm.sequence_ranks == (2 if name == "zero3_ulysses" else 1)
    assert arm.tensor_ranks == (2 if name.endswith("_tp") else 1)
    assert arm.row_ranks == arm.sequence_ranks * arm.tensor_ranks


HSDP = "hsdp has 2 groups of ranks that share the weights, and needs 4 ranks"
OF_3_4 = "mine has 3 groups of ranks that share the weights, and needs 12 ranks"
PAIRS = "zero3_hpz keeps a second copy of the weights in groups of 2 ranks"
ROWS = "zero3_ulysses gives the same rows to groups of 2 ranks"
UNEVEN = [("hsdp", 1, HSDP), ("hsdp", 2, HSDP), ("hsdp", 5, HSDP), ("mine", 6, OF_3_4), ("zero3_hpz", 3, PAIRS)]


@pytest.mark.parametrize(("name", "ranks", "what"), [*UNEVEN, ("zero3_ulysses", 3, ROWS)])
def test_groups_that_do_not_come_out_even_are_refused(name, ranks, what, tmp_path):
    """In a sentence, before anything starts."""
    mine = written(tmp_path, f"{FSDP}parallelism_config: {{{REPLICAS}: 3, {SHARDS}: 4}}")
    paths = PATHS | {"mine": mine}
    with pytest.raises(Stop, match=rf"{what} \(got {ranks}\)") as stop:
        arms.read(paths[name]).sharing_ranks(ranks)
    assert stop.value.status == "unavailable"
    assert arms.read(mine).sharing_ranks(12) == 4


def written(tmp_path, text: str):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def with_json(tmp_path, content: bytes):
    (tmp_path / "mine.json").write_bytes(content)
    return written(
        tmp_path, f"distributed_type: DEEPSPEED\ndeepspeed_config: {{deepspeed_config_file: {tmp_path / 'mine.json'}}}"
    )


@pytest.mark.parametrize(
    ("text", "promised"),  # processes, stage, clipping, optimizer states, weights
    [
        ("num_processes: 2\ndeepspeed_config: {zero_stage: 3, gradient_clipping: 0.0}", (2, 3, 0.0, "none", "none")),
        ("deepspeed_config: {offload_optimizer_device: cpu, offload_param_device: nvme}", (1, 2, 1.0, "cpu", "nvme")),
        # Accelerate's own questionnaire writes such lines.
        (
            "deepspeed_config: {offload_optimizer_nvme_path: none, offload_param_nvme_path: null}",
            (1, 2, 1.0, "none", "none"),
        ),
        ("", (1, 2, 1.0, "none", "none")),
    ],
)
def test_a_yaml_without_a_json_is_read(tmp_path, text, promised):
    """As Accelerate reads it; what it leaves out is as the libraries have it by default."""
    arm = arms.read(written(tmp_path, f"distributed_type: DEEPSPEED\n{text}"))
    assert (arm.num_processes, arm.stage, arm.clipping, arm.offload_optimizer, arm.offload_param) == promised
    assert arm.uses_nvme == ("nvme" in promised)


@pytest.mark.parametrize(
    "text",
    ["{}", '{"gradient_clipping": "auto"}'],
)
def test_a_json_that_leaves_things_out_promises_deepspeeds_defaults(tmp_path, text):
    arm = arms.read(with_json(tmp_path, text.encode()))
    assert (arm.stage, arm.clipping, arm.offload_optimizer, arm.offload_param) == (0, 1.0, "none", "none")
    assert not arm.uses_nvme


def test_a_json_is_found_from_any_folder(tmp_path, monkeypatch):
    """The path in a yaml is as seen from the root of the repository, wherever one stands."""
    monkeypatch.chdir(tmp_path)
    assert arms.read(PATHS["zero3"]).stage == 3
    (tmp_path / "here.json").write_text("{}")
    assert arms.find("here.json").read_text() == "{}", "and what is here comes first"


# --- what is refused -----------------------------------------------------------------------------------------------

ZEROS = "distributed_type: DEEPSPEED\ndeepspeed_config: "
SINGLE = "distributed_type: 'NO'\n"
FSDP = """distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_reshard_after_forward: true,
  fsdp_cpu_ram_efficient_loading: false, fsdp_offload_params: false}
"""
FIX = "fix mine.yaml"
NVME = "remove it and give --nvme-dir"
KINDS = "distributed_type must be 'NO', 'MULTI_GPU', 'DEEPSPEED' or 'FSDP'"
FILE = "correct deepspeed_config_file in mine.yaml, or run from the root of the repository"


def refused(path, what: str, remedy: str) -> None:
    with pytest.raises(Stop, match=re.escape(what)) as caught:
        arms.read(path)
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "what", "remedy"),
    [
        (ZEROS + "{offload_optimizer_nvme_path: /disk}", "nvme_path must be 'none' (got '/disk')", NVME),
        (
            "distributed_type: MULTI_GPU\nmixed_precision: bf16",
            "mixed_precision must be 'no' (got 'bf16')",
            "give --precision",
        ),
        ("- a list", "mine.yaml: must be a table (got ['a list'])", FIX),
        ("distributed_type: MARTIAN", f"{KINDS} (got 'MARTIAN')", "'NO' in"),
        ("distributed_type: NO", f"{KINDS} (got False)", "write 'NO' in quotes"),
        ("distributed_type: [", "mine.yaml' cannot be read (expected the node content", FIX),
        (SINGLE + f"# {'x' * 70_000}", "has more than 65,536 bytes", FIX),
        ("distributed_type: FSDP", "fsdp_config must be a table (got None)", FIX),
        (FSDP.replace("2", "1"), "fsdp_config fsdp_version must be 2 (got 1)", FIX),
        (FSDP.replace("fsdp_off", "fsdp_act"), "fsdp_offload_params is missing", FIX),
        (FSDP.replace("}", ", fsdp_x: 1}"), "fsdp_config fsdp_x is not known", FIX),
        (SINGLE + "num_processes: 0", "num_processes must be greater than 0 (got 0)", FIX),
        (f"{FSDP}parallelism_config: {{x: 5}}", "parallelism_config x is not known", FIX),
        (f"{FSDP}parallelism_config: {{{REPLICAS}: 0}}", "replicate_size must be greater than 0 (got 0)", FIX),
        (f"{SINGLE}parallelism_config: {{x: 1}}", "parallelism_config needs FSDP or DeepSpeed", FIX),
        (ZEROS + "5", "deepspeed_config must be a table (got 5)", FIX),
        (ZEROS + "{deepspeed_config_file: nowhere/absent.json}", "cannot be read (No such file", FILE),
        (ZEROS + "{zero_stage: 7}", "stage must be 0, 1, 2 or 3 (got 7)", FIX),
        (ZEROS + "{offload_optimizer_device: moon}", "device must be 'none', 'cpu' or 'nvme' (got 'moon')", FIX),
    ],
    ids=lambda text: text[:30],
)
def test_a_bad_yaml_is_refused(tmp_path, text, what, remedy):
    refused(written(tmp_path, text), what, remedy)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"5", "must be a table (got 5)"),
        (b'{\n "zero_optimization": {\n', "mine.json' cannot be read (Expecting property name"),
        (b'{"zero_optimization": 3}', "zero_optimization must be a table (got 3)"),
        (b'{"zero_optimization": {"offload_optimizer": "cpu"}}', "offload_optimizer must be a table (got 'cpu')"),
    ],
)
def test_a_bad_json_is_refused(tmp_path, content, what):
    refused(with_json(tmp_path, content), what, "fix mine.json")
