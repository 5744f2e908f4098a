"""What Accelerate or DeepSpeed ignores or refuses in the files of an arm, and what belongs elsewhere: a line each."""

from collections.abc import Iterator

from study.core.files import section_at, value_at
from study.core.fsdp_keys import KEYS, not_predicted, of_fsdp1, refused_in_fsdp, with_prefix
from study.core.ignored_keys import (
    OFFLOADS,
    accelerate_ignores,
    as_meant,
    beside_a_json,
    lost_paths,
    promises_ignored,
    stage_meant,
    without_a_reader,
)
from study.core.refused_values import refused_values, truths_for_numbers

STAGES = (0, 1, 2, 3)
DEVICES = ("none", "cpu", "nvme")
CHOSEN = ("fsdp_reshard_after_forward", "fsdp_offload_params")  # keys of FSDP2 that an arm may set as it likes
PRECISIONS = ("bf16", "fp16", "torch_autocast")  # sections of DeepSpeed's config
OF_THE_RUN = (
    "is a setting of the run: remove it and give --precision to study/train.py or `study estimate`; "
    "for your own trainer leave it"
)
NVME_DIR = (
    "remove it; study/train.py and `study sweep` take --nvme-dir; "
    "for your own trainer write nvme_path into a DeepSpeed json"
)
# By kind of distribution: the keys of parallelism_config. With FSDP, how many groups each hold the whole state, and the
# ranks in each; with DeepSpeed the ranks that share rows, each with a part of the tokens (Ulysses).
SHARDS = "parallelism_config_dp_shard_size"
PARALLELISM: dict[str, set[str]] = {
    "NO": set(),
    "MULTI_GPU": set(),
    "DEEPSPEED": {"parallelism_config_sp_size", "parallelism_config_sp_backend", SHARDS},
    "FSDP": {"parallelism_config_dp_replicate_size", SHARDS},
}
# What an arm with FSDP has to say, because Accelerate's defaults differ.
FSDP = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",  # otherwise the model is one unit, and nothing is saved
    "fsdp_cpu_ram_efficient_loading": False,  # otherwise only the first rank loads weights
}
# Values of which a rule here says more than their type.
JUDGED_HERE = (
    "distributed_type", "mixed_precision", "fsdp_config.fsdp_version", "zero_optimization.stage",
    "zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device",
)  # fmt: skip
NEVER_AUTO = ("zero_optimization.zero_hpz_partition_size", "tensor_parallel.autotp_size")  # nothing fills them in


def kind_of(config: dict) -> str:
    """Return the distributed_type of a yaml; without one that is known, that of the section that it has."""
    kind = config.get("distributed_type")
    if kind in tuple(PARALLELISM):
        return kind
    for name in ("DEEPSPEED", "FSDP"):
        if section_at(config, f"{name.lower()}_config"):
            return name
    return "NO"


def mistakes_in_yaml(config: dict, stage: int | None, *, of_a_run: bool) -> Iterator[str]:
    """Yield what is wrong in Accelerate's yaml. `stage` is that of its DeepSpeed config; None if it is not known.

    `of_a_run`: it is of somebody's trainer, and may have all that Accelerate takes and that changes no memory.
    """
    kind = kind_of(config)
    if config.get("distributed_type") != kind:  # yaml reads a bare NO as false
        got = f"{config.get('distributed_type')!s:.80}"
        yield f"distributed_type must be one of {', '.join(PARALLELISM)}, 'NO' in quotes (got {got})"
    # Accelerate passes it to the ranks in ACCELERATE_MIXED_PRECISION, where it would count beside --precision.
    if config.get("mixed_precision") not in ("no", False, None):
        yield f"mixed_precision {OF_THE_RUN}"
    elif config.get("mixed_precision") is not None and value_at(config, "deepspeed_config.deepspeed_config_file"):
        yield "Accelerate refuses mixed_precision beside deepspeed_config_file: remove it"
    for engine in ("DEEPSPEED", "FSDP"):
        section = f"{engine.lower()}_config"
        if config.get(section) and kind != engine:
            yield f"Accelerate ignores {section} with distributed_type {kind}: write {engine}, or remove it"
    yield from _mistakes_in_groups(section_at(config, "parallelism_config"), kind)
    yield from without_a_reader("accelerate", config | {"parallelism_config": {}})
    yield from _refused("accelerate", config)
    if kind == "DEEPSPEED":
        yield from _mistakes_around_deepspeed(section_at(config, "deepspeed_config"), stage)
    if kind == "FSDP":
        yield from (_mistakes_in_run_of_fsdp if of_a_run else _mistakes_in_fsdp)(section_at(config, "fsdp_config"))


def _mistakes_in_groups(groups: dict, kind: str) -> Iterator[str]:
    """Yield what is wrong in `parallelism_config`."""
    if unknown := {str(key) for key in groups if key not in PARALLELISM[kind]}:
        yield f"parallelism_config has keys that are not known with {kind}: {unknown}"
    for key in groups:
        may_be_auto = key == SHARDS and groups[key] == "auto"
        if key in PARALLELISM[kind] and key.endswith("_size") and not may_be_auto and not str(groups[key]).isdecimal():
            yield f"parallelism_config.{key} must be a whole number (got {groups[key]!r:.80})"


def _mistakes_around_deepspeed(section: dict, stage: int | None) -> Iterator[str]:
    """Yield what is wrong in the yaml's section for DeepSpeed."""
    for key in lost_paths(section):
        device = str(section.get(f"{key.removesuffix('_nvme_path')}_device")).lower()
        if stage in (None, 3) or device != "nvme":
            yield f"Accelerate ignores {key}: {NVME_DIR}"
        else:  # it is said that this stage writes to no disk, so nobody is told how to give it one
            yield f"Accelerate ignores {key}, and stage {stage} writes to no disk: remove it"
    beside = beside_a_json(section)
    if stage in (0, 1, 2) and "offload_param_device" in beside:  # in the json it would be the next mistake
        beside.remove("offload_param_device")
        yield f"Accelerate refuses offload_param_device beside a json, and stage {stage} ignores it: remove it"
    if beside:
        yield f"Accelerate refuses {', '.join(beside)} beside deepspeed_config_file: write it in that file alone"
    if stage is not None:
        for does, remedy in accelerate_ignores(section, stage):
            yield f"Accelerate {does}: {remedy}"


def _mistakes_in_fsdp(fsdp: dict) -> Iterator[str]:
    """Yield where a section differs from that of fsdp2.yaml, which alone was run. Only the keys of CHOSEN may.

    What Accelerate does not know at all is told already, with the name that is meant.
    """
    fsdp = as_meant("accelerate", {"fsdp_config": fsdp})["fsdp_config"]
    for key in (*FSDP, *CHOSEN):
        if key not in fsdp:
            value = f"{FSDP[key]}, " if key in FSDP else "it "
            yield f"fsdp_config has no {key}: write {value}as accelerate_configs/fsdp2.yaml has it"
    refused = dict(refused_in_fsdp(fsdp))
    for key, problem in refused.items():
        yield f"accelerate does not take this: {problem}{_in_an_arm(key)}"
    ignored = dict(of_fsdp1(fsdp))
    for key, value in fsdp.items():
        if key in ignored:
            yield f"{key} is a key of FSDP1, which FSDP2 ignores: {ignored[key]}"
        elif key in refused:
            continue
        elif value != FSDP.get(key, value):
            yield f"{key} must be {FSDP[key]}, as in accelerate_configs/fsdp2.yaml (got {value!r:.80})"
        elif key in KEYS and key not in CHOSEN and key not in FSDP:
            yield f"{key} is right, but this study did not measure it: remove it from an arm"
        elif f"fsdp_{key}" in KEYS:
            yield _without_prefix(key)


def _mistakes_in_run_of_fsdp(fsdp: dict) -> Iterator[str]:
    """Yield with what Accelerate starts no rank, and what is not predicted."""
    fsdp = with_prefix(fsdp)
    for _, problem in refused_in_fsdp(fsdp):
        yield f"accelerate does not take this: {problem}"
    yield from not_predicted(fsdp)


def _in_an_arm(key: str) -> str:
    """Return what an arm has in the place of a refused value: most of what Accelerate takes was not measured."""
    if key in FSDP:
        return f"; an arm has {FSDP[key]}"
    return "" if key in CHOSEN else "; this study did not measure it: remove it from an arm"


def _without_prefix(key: str) -> str:
    if f"fsdp_{key}" in (*FSDP, *CHOSEN):
        return f"Accelerate reads {key} as fsdp_{key}: write fsdp_{key}"
    return f"Accelerate reads {key} as fsdp_{key}, which this study did not measure: remove it from an arm"


def mistakes_in_deepspeed(config: dict) -> Iterator[str]:
    """Yield what is wrong in a DeepSpeed config."""
    # What is left out is as in DeepSpeed: see library_defaults.json.
    zero = section_at(config, "zero_optimization")
    stage = zero.get("stage", 0)
    if config.get("zero_optimization") is True:  # read_zero_config_deprecated of DeepSpeed 0.19.8, zero/config.py:60
        yield 'zero_optimization is true, the old form of stage 1: write {"stage": 1} there'
    if stage not in STAGES:
        yield f"stage must be 0, 1, 2 or 3 (got {stage!r:.80})"
    for part in OFFLOADS:
        device = section_at(zero, part).get("device", "none")
        if device not in DEVICES:
            yield f"the device of {part} must be none, cpu or nvme (got {device!r:.80})"
    yield from without_a_reader("deepspeed", config)
    yield from _refused("deepspeed", config)
    for path in truths_for_numbers("deepspeed", config):
        yield f"deepspeed takes true for 1 and false for 0: {path} must be a whole number"
    yield from _not_filled_in(config)
    for name in PRECISIONS:  # it would count beside --precision
        if str(section_at(config, name).get("enabled")).lower() == "true":  # DeepSpeed takes it in quotes, too
            yield f"{name} {OF_THE_RUN}"
    meant = stage_meant(stage)
    for does, remedy in promises_ignored(config, meant):
        yield f"stage {meant} {does}: {remedy}"


def _not_filled_in(config: dict) -> Iterator[str]:
    """Yield the numbers that are left open, although nothing fills them in."""
    if config.get("gradient_clipping", 0) is None:
        yield "gradient_clipping must be a number (got None)"
    for path in NEVER_AUTO:
        if value_at(config, path) == "auto":
            yield f"{path} must be a number (got 'auto')"


def _refused(library: str, config: dict) -> Iterator[str]:
    """Yield the values with which a library does not start."""
    for each in refused_values(library, config):
        if each.path not in JUDGED_HERE:
            yield f"{library} does not take this: {each.problem}"
