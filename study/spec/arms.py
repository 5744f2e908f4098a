"""Reads the arms from their yaml and json files in `accelerate_configs/`.

The trainer compares what a file promises with what the prepared objects really are.
"""

import functools
import hashlib
import json
import reprlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from study.errors import Stop
from study.io.load import load
from study.io.validation import nearest
from study.spec import library_defaults
from study.spec.shapes import is_local

PACKAGE = Path(__file__).resolve().parents[1]
# The repository in a checkout; the package itself in an installed wheel, which contains config files and notebooks.
ROOT = PACKAGE.parent if (PACKAGE.parent / "accelerate_configs").is_dir() else PACKAGE
FOLDER = ROOT / "accelerate_configs"
MAX_BYTES = 64 * 1024
STAGES, DEVICES = (0, 1, 2, 3), ("none", "cpu", "nvme")
OFFLOADS = ("offload_optimizer", "offload_param")
DISTRIBUTED_TYPES = ("NO", "MULTI_GPU", "DEEPSPEED", "FSDP")
# Keys of the yaml that Accelerate 1.15 refuses with a traceback if there is a json file.
NOT_BESIDE_JSON = (
    *("zero_stage", "gradient_clipping", "gradient_accumulation_steps", "zero3_save_16bit_model"),
    *(f"{part}_{what}" for part in OFFLOADS for what in ("device", "nvme_path")),
)
NAMES = (
    *("single", "ddp", "zero1", "zero2", "zero3", "zero1_cpu", "zero2_cpu", "zero3_cpu", "zero3_nvme"),
    *("fsdp2", "fsdp2_grad_op", "fsdp2_cpu"),
    *("hsdp", "zero3_hpz"),
    *("zero3_ulysses", "zero1_tp", "zero2_tp"),
)
# The keys that an FSDP arm must have, because Accelerate's default differs or because the study reads back only this.
FSDP_FIXED = {
    "fsdp_version": (2, "the first version is not read back"),
    "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "without it the whole model is one unit, and nothing is saved"),
    "fsdp_cpu_ram_efficient_loading": (False, "only the first rank would load weights, unlike in the other arms"),
}
FSDP_CHOICES = ("fsdp_reshard_after_forward", "fsdp_offload_params")
REPLICAS, SHARDS = "parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size"
SEQUENCE, SEQUENCE_BY = "parallelism_config_sp_size", "parallelism_config_sp_backend"


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
    offload_optimizer: str = "none"
    offload_param: str = "none"
    clipping: float = 0.0
    replicas: int = 1  # groups of ranks that each hold the whole state, divided among them: with FSDP that is HSDP
    shards: int | str = "auto"  # ranks in such a group; auto: all ranks divided by the number of groups
    sequence_ranks: int = 1  # ranks that share rows, each with a part of the tokens (DeepSpeed Ulysses)

    @property
    def divides_ranks(self) -> bool:
        """Whether the arm has groups of ranks, which are meant to be nodes."""
        return self.replicas > 1 or self.second_partition(2) is not None

    def second_partition(self, ranks: int) -> int | None:
        """The number of ranks that share a second copy of the weights (hpZ of ZeRO++). None without one."""
        zero = library_defaults.zero_optimization(self.deepspeed)
        among = zero["zero_hpz_partition_size"] if self.stage == 3 else 1
        return min(among, ranks) if among > 1 else None

    @property
    def row_ranks(self) -> int:
        """The number of ranks that read the same rows."""
        return self.sequence_ranks * self.tensor_ranks

    @property
    def tensor_ranks(self) -> int:
        """Ranks that divide each layer among themselves (DeepSpeed's AutoTP)."""
        return max(1, (self.deepspeed or {}).get("tensor_parallel", {}).get("autotp_size", 1))

    def sharing_ranks(self, ranks: int) -> int:
        """Return the number of ranks that hold the state together. Raise Stop if the ranks do not fill the groups."""
        self._refuse_incomplete_groups(ranks)
        if (pair := self.second_partition(ranks)) and ranks % pair:
            what = f"{self.name} keeps a second copy of the weights in groups of {pair} ranks (got {ranks})"
            raise Stop(what, f"give a multiple of {pair} ranks", "unavailable")
        if ranks % self.row_ranks:
            what = f"{self.name} gives the same rows to groups of {self.row_ranks} ranks (got {ranks})"
            raise Stop(what, f"give a multiple of {self.row_ranks} ranks", "unavailable")
        return ranks // self.replicas

    def _refuse_incomplete_groups(self, ranks: int) -> None:
        if self.replicas == 1:
            return
        if isinstance(self.shards, int):
            least = self.replicas * self.shards
            fits, needed = ranks == least, f"{least} ranks"
        else:
            least = self.replicas * 2
            fits = ranks >= least and ranks % self.replicas == 0
            needed = f"{least} ranks, or another multiple of {self.replicas} above it"
        if not fits:
            what = f"{self.name} has {self.replicas} groups of ranks that share the weights, and needs {needed}"
            raise Stop(f"{what} (got {ranks})", f"give --num_processes {least}, or --virtual-ranks", "unavailable")

    @property
    def for_cuda_alone(self) -> str | None:
        """The feature of an arm that DeepSpeed has only for NVIDIA GPUs. None if the arm has no such feature."""
        config = self.deepspeed or {}
        zero = config.get("zero_optimization", {})
        features = {
            "qwZ": zero.get("zero_quantized_weights"),
            "qgZ": zero.get("zero_quantized_gradients"),
            "SuperOffload": zero.get("offload_optimizer", {}).get("super_offload"),
            "ZenFlow": zero.get("zenflow"),
            "DeepCompile": config.get("compile", {}).get("deepcompile"),
        }
        return next((name for name, value in features.items() if value), None)

    @property
    def uses_nvme(self) -> bool:
        return "nvme" in (self.offload_optimizer, self.offload_param)


def read(path: Path) -> Arm:
    """The arm that a yaml file describes. Settings that Accelerate silently ignores are a Stop."""
    config = _content(path, f"choose one of {', '.join(all_paths())}")
    if not isinstance(config, dict) or "distributed_type" not in config:
        raise Stop(f"{path} is not an Accelerate config: no distributed_type", "start from one in accelerate_configs/")
    kind, processes = config["distributed_type"], config.get("num_processes", 1)
    if kind not in DISTRIBUTED_TYPES:
        raise Stop(
            f"{path.name} has distributed_type {reprlib.repr(kind)}, which the study cannot read back",
            f"choose one of {', '.join(DISTRIBUTED_TYPES)}; write 'NO' in quotes, or yaml reads it as false",
        )
    if config.get("mixed_precision") not in (None, "no"):
        raise Stop(
            f"{path.name} sets mixed_precision, but precision is a setting of the run, the same for every arm",
            "remove the line and give --precision",
        )
    fits = processes == "auto" or (type(processes) is int and processes > 0)
    _require(fits, path, "num_processes must be at least 1, or auto", processes)
    if kind == "FSDP":
        return _fsdp_arm(path, processes, config)
    if kind == "DEEPSPEED":
        return _deepspeed_arm(path, processes, config)
    _require("parallelism_config" not in config, path, "parallelism_config needs FSDP or DeepSpeed", kind)
    return Arm(path.stem, path, kind, processes)


def _fsdp_arm(path: Path, processes: int | str, config: dict) -> Arm:
    fsdp = _fsdp(path, config.get("fsdp_config"))
    home = "cpu" if fsdp["fsdp_offload_params"] else "none"
    groups = _groups(path, config.get("parallelism_config"))
    arm = Arm(path.stem, path, "FSDP", processes, fsdp=fsdp, offload_optimizer=home, offload_param=home)
    return replace(arm, **groups)


def _deepspeed_arm(path: Path, processes: int | str, config: dict) -> Arm:
    deepspeed = _deepspeed(path, config.get("deepspeed_config"))
    zero, clipping = deepspeed.get("zero_optimization", {}), deepspeed.get("gradient_clipping", "auto")
    if clipping == "auto":  # Accelerate fills in the same value
        clipping = library_defaults.sections("deepspeed")[""]["gradient_clipping"]
    optimizer_home, weights_home = (zero.get(part, {}).get("device", "none") for part in OFFLOADS)
    return Arm(
        path.stem,
        path,
        "DEEPSPEED",
        processes,
        deepspeed,
        stage=library_defaults.zero_optimization(deepspeed)["stage"],
        offload_optimizer=optimizer_home,
        offload_param=weights_home,
        clipping=clipping,
        sequence_ranks=_sequence_ranks(path, config.get("parallelism_config")),
    )


def _content(path: Path, missing: str) -> Any:
    """Return the content of a config file. Its size is limited, so that a wrong path cannot fill the memory."""
    remedy = f"fix {path.name:.80}"
    return load(path, Any, what="a config", remedy=remedy, most_bytes=MAX_BYTES, links=True, missing=missing)


def _require(fits: bool, path: Path, what: str, value) -> None:
    if not fits:
        raise Stop(f"{path}: {what} (got {reprlib.repr(value)})", f"fix {path.name}")


def _fsdp(path: Path, section) -> dict:
    """The FSDP config of an arm, as written. Keys that the study does not read back are a Stop."""
    _require(isinstance(section, dict), path, "fsdp_config must be a mapping", section)
    for key, (value, why) in FSDP_FIXED.items():
        _require(section.get(key) == value, path, f"{key} must be {value}: {why}", section.get(key))
    for key in FSDP_CHOICES:
        _require(isinstance(section.get(key), bool), path, f"{key} must be true or false", section.get(key))
    if unknown := section.keys() - {*FSDP_FIXED, *FSDP_CHOICES}:
        what = f"{path.name} sets {', '.join(sorted(unknown))} in fsdp_config, which the study does not read back"
        raise Stop(what, "remove it; recomputation is --checkpointing")
    return section


def _groups(path: Path, section) -> dict:
    """The number of groups of ranks, and the ranks in each. By default all ranks are one group."""
    if section is None:
        return {}
    _refuse_other_keys(path, section, REPLICAS, SHARDS)
    replicas, shards = section.get(REPLICAS, 1), section.get(SHARDS, "auto")
    _require(type(replicas) is int and replicas > 0, path, f"{REPLICAS} must be at least 1", replicas)
    _require(shards == "auto" or (type(shards) is int and shards > 1), path, f"{SHARDS} must be 2 or more", shards)
    return {"replicas": replicas, "shards": shards}


def _refuse_other_keys(path: Path, section, first: str, second: str) -> None:
    """A Stop for other keys of parallelism_config than those that are read back for the arm's kind."""
    _require(isinstance(section, dict), path, "parallelism_config must be a mapping", section)
    if unknown := section.keys() - {first, second}:
        what = f"{path.name} sets {', '.join(sorted(unknown))}, which the study does not read back in such an arm"
        raise Stop(what, f"leave only {first} and {second} in parallelism_config")


def _sequence_ranks(path: Path, section) -> int:
    """The number of ranks that share rows under DeepSpeed, each with a part of the tokens."""
    if section is None:
        return 1
    _refuse_other_keys(path, section, SEQUENCE, SEQUENCE_BY)
    among, by = section.get(SEQUENCE, 1), section.get(SEQUENCE_BY, "deepspeed")
    _require(type(among) is int and among > 0, path, f"{SEQUENCE} must be at least 1", among)
    _require(by == "deepspeed", path, f"{SEQUENCE_BY} must be deepspeed", by)
    return among


def _deepspeed(path: Path, section) -> dict:
    """The DeepSpeed config of an arm: its json, or the config that Accelerate makes of the yaml's keys."""
    section = {} if section is None else section
    _require(isinstance(section, dict), path, "deepspeed_config must be a mapping", section)
    if (file := section.get("deepspeed_config_file")) is not None:
        _require(isinstance(file, str), path, "deepspeed_config_file must be a path", file)
        if twice := [name for name in NOT_BESIDE_JSON if name in section]:
            raise Stop(f"{path.name} sets {', '.join(twice)} beside a deepspeed_config_file", f"move it into {file}")
        remedy = f"correct deepspeed_config_file in {path.name}, or run from the root of the repository"
        return _checked(find(file), _content(find(file), remedy))
    for key in ("offload_optimizer_nvme_path", "offload_param_nvme_path"):
        # Accelerate 1.15 reads the key and never passes it on: the files would go to ./none.
        if section.get(key) not in (None, "none"):
            raise Stop(f"{path.name} sets {key}, which Accelerate ignores", "remove it and give --nvme-dir")
    zero = {"stage": section.get("zero_stage", 2)}
    zero |= {part: {"device": section.get(f"{part}_device") or "none"} for part in OFFLOADS}
    # Accelerate and DeepSpeed both clip at 1.0 unless the yaml says otherwise.
    return _checked(path, {"gradient_clipping": section.get("gradient_clipping", 1.0), "zero_optimization": zero})


def _checked(path: Path, config) -> dict:
    """A DeepSpeed config as written. The parts that the study reads must have the types that DeepSpeed takes.

    DeepSpeed treats a null section as absent, so it is left out.
    """
    _require(isinstance(config, dict), path, "the file must be a JSON object", config)
    config = {name: value for name, value in config.items() if name != "zero_optimization" or value is not None}
    clipping = config.get("gradient_clipping", "auto")
    _require(type(clipping) in (int, float) or clipping == "auto", path, "gradient_clipping must be a number", clipping)
    tensor = config.get("tensor_parallel", {})
    among = tensor.get("autotp_size", 0) if isinstance(tensor, dict) else tensor
    _require(type(among) is int and among >= 0, path, "tensor_parallel.autotp_size must be a number of ranks", among)
    if "zero_optimization" not in config:
        return config
    zero = config["zero_optimization"]
    _require(isinstance(zero, dict), path, "zero_optimization must be an object", zero)
    _require(zero.get("stage", 0) in STAGES, path, "stage must be 0, 1, 2 or 3", zero.get("stage"))
    among = zero.get("zero_hpz_partition_size", 1)
    _require(type(among) is int and among >= 0, path, "zero_hpz_partition_size must be a number of ranks", among)
    zero = {name: value for name, value in zero.items() if name not in OFFLOADS or value is not None}
    for part in OFFLOADS:
        section = zero.get(part, {})
        device = section.get("device", "none") if isinstance(section, dict) else section
        fits = isinstance(section, dict) and device in DEVICES
        _require(fits, path, f"{part} must be an object whose device is {', '.join(DEVICES)}", device)
    return config | {"zero_optimization": zero}


def find(file: str | Path) -> Path:
    """A path that a config names: relative to the current folder if it exists there, else to the repository's root."""
    return Path(file) if is_local(str(file)) else ROOT / file


def all_paths() -> dict[str, Path]:
    """The files of all arms by name: the arms in their order, then the variants."""
    variants = sorted((FOLDER / "variants").glob("*.yaml"))
    return {name: FOLDER / f"{name}.yaml" for name in NAMES} | {path.stem: path for path in variants}


def launcher(config: Path) -> list[str]:
    """`accelerate launch` with a config file. Starting this module saves 1.1 s, as it imports no other commands."""
    return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]


def digest(name: str) -> str:
    """A short digest of an arm's files without their comments: it changes whenever the arm does."""
    arm = read(all_paths()[name])
    content = [arm.distributed_type, arm.num_processes, arm.deepspeed, *([arm.fsdp] if arm.fsdp else [])]
    content += [arm.replicas, arm.shards] if arm.replicas > 1 else []
    content += [arm.sequence_ranks] if arm.sequence_ranks > 1 else []
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@functools.cache
def load_arm(name: str) -> Arm:
    """Read the arm of this name in `accelerate_configs/`."""
    if name not in all_paths():
        raise Stop(f"{name!r} is not an arm", nearest(name, all_paths()))
    return read(all_paths()[name])


def check_virtual(arm: Arm, init: str | None) -> None:
    """Refuse virtual ranks of an arm without a group, and of an arm that writes tensors without values to a disk."""
    if arm.distributed_type == "NO":
        what = f"virtual ranks need an arm for several ranks, and {arm.name} is for one"
        raise Stop(what, "give another arm, such as ddp")
    if init == "none" and arm.uses_nvme:
        raise Stop("tensors without values cannot be written to disk", "give an arm without NVMe, such as zero3_cpu")
