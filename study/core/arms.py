"""Reads the arms from their yaml and json files in `accelerate_configs/`.

The trainer compares what a file promises with what the prepared objects really are.
"""

import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from study.core.cache import fingerprint
from study.core.errors import Stop, nearest
from study.core.files import load, section_at, section_of, why
from study.core.ignored_keys import promises_ignored, without_a_reader
from study.core.library_defaults import library_defaults
from study.core.shapes import is_local
from study.core.text import comparable

PACKAGE = Path(__file__).resolve().parents[1]
# The repository in a checkout; the package itself in an installed wheel, which contains config files.
ROOT = PACKAGE.parent if (PACKAGE.parent / "accelerate_configs").is_dir() else PACKAGE
FOLDER = ROOT / "accelerate_configs"
MAX_BYTES = 64 * 1024  # the largest of ours has 1 kB
OFFLOADS = ("offload_optimizer", "offload_param")
CHOSEN = ("fsdp_reshard_after_forward", "fsdp_offload_params")  # keys of FSDP2 that an arm may set as it likes
LONGEST = 2000  # characters of all that is wrong with an arm
PRECISIONS = ("bf16", "fp16", "torch_autocast")  # sections of DeepSpeed's config
DEEPSPEED_NUMBERS = ("gradient_clipping", "gradient_accumulation_steps")  # that Accelerate's yaml passes on
# In the order in which tables and notebooks show them, and `study advise` prefers them: the simplest first. The files
# of variants/ are arms, too, and come after these.
NAMES = (
    "single", "ddp", "zero1", "zero2", "zero3", "zero1_cpu", "zero2_cpu", "zero3_cpu", "zero3_nvme",
    "fsdp2", "fsdp2_grad_op", "fsdp2_cpu", "hsdp", "zero3_hpz", "zero3_ulysses", "zero1_tp", "zero2_tp",
)  # fmt: skip
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


@dataclass(frozen=True)
class Arm:
    """What the files of an arm promise. `deepspeed` and `fsdp` are the configs as written; None without them."""

    name: str
    path: Path
    distributed_type: str
    num_processes: int | str
    deepspeed: dict | None = None
    fsdp: dict | None = None
    stage: int | None = None
    offload_optimizer: str = "none"  # where states are between their uses: cpu, nvme, or none for the device itself
    offload_param: str = "none"
    clipping: float = 0.0
    replicas: int = 1  # groups of ranks that each hold the whole state, divided among them: with FSDP that is HSDP
    shards: int | Literal["auto"] = "auto"  # ranks in such a group; auto: all ranks divided by the number of groups
    sequence_ranks: int = 1  # ranks that share rows, each with a part of the tokens (DeepSpeed Ulysses)
    tensor_ranks: int = 1  # ranks that divide each layer among themselves (DeepSpeed's AutoTP)
    second_copy_ranks: int = 1  # ranks that share a second copy of the weights (hpZ of ZeRO++); 1: there is none

    @property
    def divides_ranks(self) -> bool:
        """Return whether the arm has groups of ranks, which are meant to be nodes."""
        return self.replicas > 1 or self.second_partition(2) is not None

    def second_partition(self, ranks: int) -> int | None:
        """Return how many of these ranks share a second copy of the weights. None without one."""
        # Fewer ranks than it says are one group.
        return min(self.second_copy_ranks, ranks) if self.second_copy_ranks > 1 else None

    @property
    def row_ranks(self) -> int:
        """Return the number of ranks that read the same rows."""
        return self.sequence_ranks * self.tensor_ranks

    def sharing_ranks(self, ranks: int) -> int:
        """Return the number of ranks that hold the state together. Raise Stop if the ranks do not fill the groups."""
        # A group of one rank would divide nothing: two ranks each are the least.
        in_group, left_over = divmod(ranks, self.replicas)
        if self.replicas > 1 and (left_over or in_group < 2 or self.shards not in ("auto", in_group)):
            least = self.replicas * (2 if self.shards == "auto" else self.shards)
            what = f"{self.name} has {self.replicas} groups of ranks that share the weights, and needs {least} ranks"
            raise Stop(
                f"{what} (got {ranks})",
                f"take {least} ranks: --num_processes, --virtual-ranks or --gpus",
                "unavailable",
            )
        groups = {
            "keeps a second copy of the weights in": self.second_partition(ranks) or 1,
            "gives the same sequences to": self.row_ranks,
        }
        for does, size in groups.items():
            if ranks % size:
                what = f"{self.name} {does} groups of {size} ranks (got {ranks})"
                raise Stop(what, f"give a multiple of {size} ranks", "unavailable")
        return in_group

    @property
    def uses_nvme(self) -> bool:
        return "nvme" in (self.offload_optimizer, self.offload_param)


def read(path: Path) -> Arm:
    """Return the arm that a yaml file describes. Raise Stop for settings that Accelerate silently ignores."""
    config = _content(path, f"name a file, or choose one of {', '.join(all_paths())}")
    section = config.get("deepspeed_config")
    file = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    remedy = f"fix {path.name}" + (f" or {Path(file).name}" if file else "")
    try:
        is_deepspeed = config.get("distributed_type") == "DEEPSPEED"
        content = _deepspeed_config(section_of(config, "deepspeed_config"), path) if is_deepspeed else {}
        if wrong := [*_wrong(config, content)]:
            raise Stop(f"{path}: {'; '.join(wrong)[:LONGEST]}", remedy)
        return _arm(config, content, path)
    except (TypeError, ValueError) as error:
        raise Stop(f"{path}: {why(error)}", remedy) from None


def _arm(config: dict, content: dict, path: Path) -> Arm:
    kind = config["distributed_type"]
    groups = section_of(config, "parallelism_config")
    arm = Arm(path.stem, path, kind, config.get("num_processes", 1))
    if kind == "FSDP":
        return replace(arm, **_of_fsdp(section_of(config, "fsdp_config"), groups))
    if kind == "DEEPSPEED":
        return replace(arm, **_of_deepspeed(content, groups))
    return arm


def _wrong(config: dict, content: dict) -> Iterator[str]:
    """Yield all that is wrong with an arm, or ignored in it. `content`: its DeepSpeed config."""
    kind = config.get("distributed_type")
    if kind not in PARALLELISM:  # yaml reads a bare NO as false
        yield f"distributed_type must be one of {', '.join(PARALLELISM)}, 'NO' in quotes (got {kind})"
        return
    yield from _wrong_in_yaml(config, kind)
    if kind == "DEEPSPEED":
        yield from _wrong_in_deepspeed(content, section_of(config, "deepspeed_config"))
    if kind == "FSDP":
        yield from _wrong_in_fsdp(section_of(config, "fsdp_config"))


def _wrong_in_yaml(config: dict, kind: str) -> Iterator[str]:
    """Yield what Accelerate ignores or refuses in its own file."""
    ranks = config.get("num_processes", 1)
    if ranks != "auto" and ranks < 1:
        yield f"num_processes must be greater than 0 (got {ranks})"
    # Accelerate passes it to the ranks in ACCELERATE_MIXED_PRECISION, where it would count beside --precision.
    if config.get("mixed_precision") not in ("no", None):
        yield "mixed_precision is a setting of the run: remove it and give --precision"
    for engine in ("DEEPSPEED", "FSDP"):
        section = f"{engine.lower()}_config"
        if config.get(section) and kind != engine:
            yield f"Accelerate ignores {section} with distributed_type {kind}: write {engine}, or remove it"
    if unknown := section_of(config, "parallelism_config").keys() - PARALLELISM[kind]:
        yield f"parallelism_config has keys that are not known under {kind}: {unknown}"
    yield from without_a_reader("accelerate", config | {"parallelism_config": {}})


def _wrong_in_fsdp(fsdp: dict) -> Iterator[str]:
    """Yield where a section differs from that of fsdp2.yaml, which alone was run."""
    wrong = [f"write {key}" for key in (*FSDP, *CHOSEN) if key not in fsdp]
    wrong += [f"remove {key}" for key in fsdp if key not in (*FSDP, *CHOSEN)]
    wrong += [f"{key} must be {value}" for key, value in FSDP.items() if fsdp.get(key, value) != value]
    if wrong:
        may_differ = " and ".join(CHOSEN)
        yield f"fsdp_config must be that of fsdp2.yaml, and only {may_differ} may differ: {', '.join(wrong)}"


def _of_fsdp(fsdp: dict, groups: dict) -> dict[str, Any]:
    # Its offload is one switch: states and weights go to the host together.
    home = "cpu" if fsdp["fsdp_offload_params"] else "none"
    return {
        "fsdp": fsdp,
        "offload_optimizer": home,
        "offload_param": home,
        "replicas": max(1, int(groups.get("parallelism_config_dp_replicate_size", 1))),
        "shards": groups.get(SHARDS, "auto"),
    }


def _deepspeed_config(section: dict, path: Path) -> dict:
    """Return the config in the keys of the yaml, or in a json of its own."""
    if file := section.get("deepspeed_config_file"):  # Accelerate refuses a yaml that sets any of these beside a json
        remedy = f"correct deepspeed_config_file in {path.name}, or run from the root of the repository"
        return _content(find(file), remedy)
    # A clipping of 0 is promised, although Accelerate drops it: the trainer then says so. It clips at 1.0 by default.
    return config_of_yaml(section) | {"gradient_clipping": section.get("gradient_clipping", 1.0)}


def _wrong_in_deepspeed(content: dict, section: dict) -> Iterator[str]:
    """Yield what DeepSpeed or Accelerate ignores or refuses in a config, and in the section of the yaml around it."""
    # What is left out is as in DeepSpeed: see library_defaults.json.
    zero = section_of(content, "zero_optimization")
    stage = zero.get("stage", 0)
    homes = {part: section_of(zero, part).get("device", "none") for part in OFFLOADS}
    for part in OFFLOADS:  # Accelerate 1.15 reads them and never passes them on: the files would go to ./none
        if section.get(f"{part}_nvme_path") not in ("none", None):
            yield f"Accelerate ignores {part}_nvme_path: remove it and give --nvme-dir"
    if stage not in (0, 1, 2, 3) or not {*homes.values()} <= {"none", "cpu", "nvme"}:
        yield f"stage must be 0, 1, 2 or 3, and a device none, cpu or nvme (got {stage}, {homes})"
        return
    if stage != 3 and section.get("zero3_init_flag") is True:  # it warns, and goes on without (utils/dataclasses.py)
        yield f"Accelerate ignores zero3_init_flag with stage {stage}: take stage 3, or remove it"
    yield from without_a_reader("deepspeed", content)
    for name in PRECISIONS:  # it would count beside --precision
        if section_at(content, name).get("enabled") is True:
            yield f"{name} is a setting of the run: remove it and give --precision"
    for does, remedy in promises_ignored(content, stage, also_defaults=True):
        yield f"stage {stage} {does}: {remedy}"


def _of_deepspeed(content: dict, groups: dict) -> dict[str, Any]:
    zero = section_of(content, "zero_optimization")
    stage = zero.get("stage", 0)
    homes = {part: section_of(zero, part).get("device", "none") for part in OFFLOADS}
    clipping = content.get("gradient_clipping", "auto")
    if clipping == "auto":  # Accelerate fills in the value that is DeepSpeed's default, too
        clipping = 1.0
    return homes | {
        "deepspeed": content,
        "stage": stage,
        "clipping": float(clipping),
        "sequence_ranks": max(1, int(groups.get("parallelism_config_sp_size", 1))),
        "tensor_ranks": max(1, int(section_of(content, "tensor_parallel").get("autotp_size", 0))),  # 0: off
        "second_copy_ranks": int(zero.get("zero_hpz_partition_size", 1)),  # 1: no second copy
    }


def config_of_yaml(section: dict) -> dict:
    """Return the DeepSpeed config that Accelerate makes of the keys in its yaml. It drops a clipping of 0.

    DeepSpeed's default of 1.0 then takes its place (utils/dataclasses.py:1321 of Accelerate 1.15.0).
    """
    # A path for NVMe is left out on purpose: it does not arrive (reproductions/nvme_path_from_yaml.py). Stage 2 is the
    # default of Accelerate's plugin (utils/dataclasses.py:1238).
    devices = {part: str(section.get(f"{part}_device")).lower() for part in OFFLOADS}
    zero = {part: {"device": device} for part, device in devices.items() if device != "none"}
    written = {name: comparable(section[name]) for name in DEEPSPEED_NUMBERS if section.get(name)}
    stage = section.get("zero_stage")
    return {"zero_optimization": {"stage": 2 if stage is None else stage} | zero} | written


def _content(path: Path, missing: str) -> dict:
    """Return the content of a config file. Its size is limited, so that a wrong path cannot fill the memory."""
    remedy = f"fix {path.name:.80}"
    return load(path, dict, what="a config", remedy=remedy, most_bytes=MAX_BYTES, links=True, missing=missing)


def find(file: str | Path) -> Path:
    """Return the path that a config names: in the current folder if it exists there, else in the repository's root."""
    return Path(file) if is_local(str(file)) else ROOT / file


def all_paths() -> dict[str, Path]:
    """Return the files of all arms by name: the arms in their order, then the variants."""
    # By name and not by folder, so that no variant can hide an arm.
    variants = sorted((FOLDER / "variants").glob("*.yaml"))
    return {name: FOLDER / f"{name}.yaml" for name in NAMES} | {path.stem: path for path in variants}


def launcher(config: Path) -> list[str]:
    """Return `accelerate launch` with a config file. This module imports no other commands, which saves 1.1 s."""
    return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]


def digest(name: str) -> str:
    """Return a short digest of an arm's files without their comments: it changes whenever the arm does."""
    arm = load_arm(name)
    content: list = [arm.distributed_type, arm.num_processes, arm.deepspeed]
    # What came later than the first records is left out where it is not used: their digests stay as they are.
    if arm.fsdp:
        content.append(arm.fsdp)
    if arm.replicas > 1:
        content += [arm.replicas, arm.shards]
    if arm.sequence_ranks > 1:
        content.append(arm.sequence_ranks)
    return fingerprint(content)


def load_arm(name: str) -> Arm:
    """Read the arm of this name in `accelerate_configs/`, or a file of somebody else."""
    return read(Path(name)) if name.endswith((".yaml", ".yml")) else _of_name(name)


@functools.cache
def _of_name(name: str) -> Arm:
    if name not in all_paths():
        if name.endswith(".json"):
            raise Stop(f"{name!r} is not an arm", "give the .yaml of Accelerate that names this file")
        remedy = nearest(name, all_paths(), otherwise=f"choose one of {', '.join(all_paths())}, or give a .yaml file")
        # A name that is too long for a file makes pathlib raise.
        if here := [path for path in (Path(f"{name}.yaml"), FOLDER / f"{name}.yaml") if os.path.isfile(path)]:  # noqa: PTH113
            remedy = f"to give a file, write its path: {here[0]}"
        raise Stop(f"{name!r} is not an arm", remedy)
    return read(all_paths()[name])


def check_virtual(arm: Arm, init: str | None) -> None:
    """Refuse virtual ranks of an arm without a group, and tensors without values where an arm needs values."""
    if arm.distributed_type == "NO":
        what = f"virtual ranks need an arm for several ranks, and {arm.name} is for one"
        raise Stop(what, "give another arm, such as ddp")
    if init == "none" and arm.tensor_ranks > 1:
        raise Stop("AutoTP cannot divide layers without values", "give --init random", "unavailable")
    if init == "none" and arm.uses_nvme:
        raise Stop("tensors without values cannot be written to disk", "give an arm without NVMe, such as zero3_cpu")


def feature_for_cuda_alone(config: dict | None) -> str | None:
    """Return what a DeepSpeed config switches on that DeepSpeed has only for NVIDIA GPUs. None if there is nothing."""
    zero = zero_optimization(config)
    if zero["zero_quantized_weights"]:
        return "qwZ"
    if zero["zero_quantized_gradients"]:
        return "qgZ"
    return None


def zero_optimization(config: dict | None) -> dict[str, Any]:
    """Return the section `zero_optimization` of a DeepSpeed config, with the defaults of keys that it does not have."""
    return library_defaults("deepspeed")["zero_optimization"] | ((config or {}).get("zero_optimization") or {})
