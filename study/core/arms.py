"""Reads the arms from their yaml and json files in `accelerate_configs/`.

The trainer compares what a file promises with what the prepared objects really are.
"""

import functools
import itertools
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from study.core.arm_mistakes import OF_THE_RUN, SHARDS, kind_of, mistakes_in_deepspeed, mistakes_in_yaml
from study.core.cache import fingerprint
from study.core.errors import Stop, nearest
from study.core.files import load, section_at
from study.core.fsdp_keys import as_fsdp2, strategy_of, version_of, with_prefix
from study.core.ignored_keys import OFFLOADS, stage_meant
from study.core.library_defaults import library_defaults
from study.core.shapes import is_local
from study.core.text import comparable

PACKAGE = Path(__file__).resolve().parents[1]
# The repository in a checkout; the package itself in an installed wheel, which contains config files.
IS_CHECKOUT = (PACKAGE.parent / "accelerate_configs").is_dir()
ROOT = PACKAGE.parent if IS_CHECKOUT else PACKAGE
FOLDER = ROOT / "accelerate_configs"
# A stage as people write it: 3, stage3, zero-3, z3_offload.
STAGE = r"(?i)(?:deepspeed|ds|zero|z)?[ _-]*(?:stage)?[ _=-]*([1-3])(?:[ _-]*(cpu|offload|nvme))?"
MAX_BYTES = 64 * 1024  # the largest of ours has 1 kB
LONGEST = 2000  # characters of all that is wrong with an arm
DEEPSPEED_NUMBERS = ("gradient_clipping", "gradient_accumulation_steps")  # that Accelerate's yaml passes on
# In the order in which tables and notebooks show them, and `study advise` prefers them: the simplest first. The files
# of variants/ are arms, too, and come after these.
NAMES = (
    "single", "ddp", "zero1", "zero2", "zero3", "zero1_cpu", "zero2_cpu", "zero3_cpu", "zero3_nvme",
    "fsdp2", "fsdp2_grad_op", "fsdp2_cpu", "hsdp", "zero3_hpz", "zero3_ulysses", "zero1_tp", "zero2_tp",
)  # fmt: skip


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


@dataclass(frozen=True)
class Mistake:
    """Something wrong in a file of an arm, or ignored in it, and what to do: in one line."""

    file: Path
    said: str


@dataclass(frozen=True)
class ArmFiles:
    """What the yaml of an arm says, and its DeepSpeed config: in the yaml, or in a json that it names."""

    path: Path
    config: dict
    json_path: Path | None = None
    deepspeed: dict | None = None  # None: there is none, or it is not known
    unread: str = ""  # why the json cannot be read
    of_a_run: bool = False  # it is that of somebody's trainer, which may set the precision

    @property
    def mistakes(self) -> list[Mistake]:
        """All mistakes of both files."""
        deepspeed = self.deepspeed or {}
        stage = None if self.deepspeed is None else section_at(deepspeed, "zero_optimization").get("stage", 0)
        in_yaml = [*mistakes_in_yaml(self.config, stage_meant(stage), of_a_run=self.of_a_run)]
        of_yaml = [Mistake(self.path, said) for said in [self.unread, *in_yaml] if said]
        # Without its json, what is known of the config is what the yaml says.
        file = self.path if self.unread or self.json_path is None else self.json_path
        mistakes = of_yaml + [Mistake(file, said) for said in mistakes_in_deepspeed(deepspeed)]
        return [each for each in mistakes if not (self.of_a_run and each.said.endswith(OF_THE_RUN))]


def read(path: Path, *, of_a_run: bool = False) -> Arm:
    """Return the arm that a yaml file describes. Raise Stop for settings that Accelerate silently ignores.

    `of_a_run`: the file is that of somebody's trainer, which may set the precision.
    """
    files = replace(files_of(path), of_a_run=of_a_run)
    if mistakes := files.mistakes:
        said = "; ".join(each.said for each in mistakes)
        json_name = f" or {files.json_path.name}" if files.json_path else ""
        lines = f"; `study arms {path}` tells each in a line" if len(mistakes) > 1 else ""
        raise Stop(f"{path}: {said[:LONGEST]}", f"fix {path.name}{json_name}{lines}")
    return _arm(files)


def _arm(files: ArmFiles) -> Arm:
    kind = files.config["distributed_type"]
    groups = section_at(files.config, "parallelism_config")
    arm = Arm(files.path.stem, files.path, kind, files.config.get("num_processes", 1))
    if kind == "FSDP":
        return replace(arm, **_of_fsdp(files, section_at(files.config, "fsdp_config"), groups))
    if files.deepspeed is not None:
        return replace(arm, **_of_deepspeed(files.deepspeed, groups))
    return arm


def files_of(path: Path) -> ArmFiles:
    """Read a yaml and the json that it names. Raise Stop for a yaml that cannot be read."""
    config = _content(path, "name a file that is here, or an arm: `study arms` lists them")
    section = section_at(config, "deepspeed_config")
    if kind_of(config) != "DEEPSPEED":
        return ArmFiles(path, config)
    name = section.get("deepspeed_config_file")
    if not name:
        # A clipping of 0 is promised, although Accelerate drops it, and clips at 1.0: the trainer then says so.
        clipping = section.get("gradient_clipping")
        content = config_of_yaml(section) | {"gradient_clipping": 1.0 if clipping is None else clipping}
        return ArmFiles(path, config, deepspeed=content)
    of_yaml = config_of_yaml(section) if "zero_stage" in section else None  # otherwise the stage is the json's
    json_path = find(str(name), path.parent)
    if not is_local(str(json_path)):
        what = f"deepspeed_config_file is {name!r:.200}, which is neither beside {path.name} nor in the current folder"
        return ArmFiles(path, config, None, of_yaml, f"{what}: correct that path")
    try:
        return ArmFiles(path, config, json_path, _content(json_path))
    except Stop as stop:
        return ArmFiles(path, config, json_path, of_yaml, f"{stop.what}: {stop.remedy}")


def _of_fsdp(files: ArmFiles, fsdp: dict, groups: dict) -> dict[str, Any]:
    meant = as_fsdp2(fsdp)
    # Its offload is one switch: states and weights go to the host together.
    home = "cpu" if meant["fsdp_offload_params"] else "none"
    replicas = max(1, int(groups.get("parallelism_config_dp_replicate_size", 1)))
    shards = groups.get(SHARDS, "auto")
    written = with_prefix(fsdp)
    if version_of(written) == "1" and strategy_of(written).startswith("HYBRID"):  # its groups are nodes
        replicas = int(files.config.get("num_machines", 1))
        shards = int(files.config.get("num_processes", replicas)) // replicas
    return {
        "fsdp": written | meant if files.of_a_run else fsdp,
        "offload_optimizer": home,
        "offload_param": home,
        "replicas": replicas,
        "shards": shards,
    }


def _of_deepspeed(content: dict, groups: dict) -> dict[str, Any]:
    zero = section_at(content, "zero_optimization")
    stage = zero.get("stage", 0)
    homes = {part: section_at(zero, part).get("device", "none") for part in OFFLOADS}
    clipping = content.get("gradient_clipping", "auto")
    if clipping == "auto":  # Accelerate fills in the value that is DeepSpeed's default, too
        clipping = 1.0
    return homes | {
        "deepspeed": content,
        "stage": stage,
        "clipping": float(clipping),
        "sequence_ranks": max(1, int(groups.get("parallelism_config_sp_size", 1))),
        "tensor_ranks": max(1, int(section_at(content, "tensor_parallel").get("autotp_size", 0))),  # 0: off
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


def _content(path: Path, missing: str = "") -> dict:
    """Return the content of a config file. Its size is limited, so that a wrong path cannot fill the memory."""
    remedy = f"fix {path.name:.80}"
    return load(path, dict, what="a config", remedy=remedy, most_bytes=MAX_BYTES, links=True, missing=missing)


def find(file: str | Path, beside: Path | None = None) -> Path:
    """Return the path that a config names: in the folder of that config, the current one, or the repository's root."""
    for folder in (beside, Path()):
        if folder is not None and is_local(str(folder / file)):
            return folder / file
    return ROOT / file


def all_paths() -> dict[str, Path]:
    """Return the files of all arms by name: the arms in their order, then the variants."""
    # By name and not by folder, so that no variant can hide an arm.
    variants = sorted((FOLDER / "variants").glob("*.yaml"))
    return {name: FOLDER / f"{name}.yaml" for name in NAMES} | {path.stem: path for path in variants}


def first_sentence(path: Path) -> str:
    """Return the first sentence of the comment with which an arm's file begins."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text("utf-8", "replace").splitlines())
    comment = " ".join(line.strip("# ") for line in lines)
    return comment.partition(". ")[0].rstrip(".") + "."


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


def is_file_name(name: str) -> bool:
    """Whether a name is that of somebody's own file, and not of an arm in `accelerate_configs/`."""
    return name.endswith((".yaml", ".yml"))


def load_arm(name: str, *, of_a_run: bool = False) -> Arm:
    """Read the arm of this name in `accelerate_configs/`, or a file of somebody else, which may be of their run."""
    return read(Path(name), of_a_run=of_a_run) if is_file_name(name) else _of_name(name)


def mistakes_of(name: str) -> list[Mistake]:
    """Return all that is wrong with the files of an arm, by its name or its file. Raise Stop without a yaml."""
    return files_of(Path(name) if is_file_name(name) else _path_of(name)).mistakes


@functools.cache
def _of_name(name: str) -> Arm:
    return read(_path_of(name))


def _path_of(name: str) -> Path:
    if name not in all_paths():
        if name.endswith(".json"):
            raise Stop(f"{name!r} is not an arm", "give the .yaml of Accelerate that names this file")
        remedy = nearest(
            of_stage(name), all_paths(), otherwise=f"choose one of {', '.join(all_paths())}, or give a .yaml file"
        )
        if "," in name:
            remedy = "give one arm at a time"
        if here := [path for path in (Path(f"{name}.yaml"), FOLDER / f"{name}.yaml") if is_local(str(path))]:
            remedy = f"to give a file, write its path: {here[0]}"
        raise Stop(f"{name!r} is not an arm", remedy)
    return all_paths()[name]


def of_stage(name: str) -> str:
    """Return the name that the arm of a stage has here; another name as it is."""
    match = re.fullmatch(STAGE, name)
    if match is None:
        return name
    stage, place = match.groups()
    if place is None:
        return f"zero{stage}"
    return f"zero{stage}_{'nvme' if place.lower() == 'nvme' else 'cpu'}"


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
    zero = library_defaults("deepspeed")["zero_optimization"] | ((config or {}).get("zero_optimization") or {})
    # Left open, it is set by the stage (zero/config.py, overlap_comm_valid).
    return zero | ({"overlap_comm": zero["stage"] == 3} if zero["overlap_comm"] is None else {})
