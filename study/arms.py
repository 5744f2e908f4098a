"""What each arm is, read from its yaml, and whether this machine can run it.

An arm is a file in `accelerate_configs/`. This module only reads: what the file promises is compared, in the trainer,
with what the prepared objects turn out to be.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import yaml

from study.record import Stop

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "accelerate_configs"
SAID_BY_THE_JSON = (
    "zero_stage", "gradient_clipping", "gradient_accumulation_steps", "offload_optimizer_device",
    "offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_save_16bit_model",
)  # fmt: skip
DISTRIBUTED_TYPES = ("NO", "MULTI_GPU", "DEEPSPEED")
NAMES = ("single", "ddp", "zero1", "zero2", "zero3", "zero1_cpu", "zero2_cpu", "zero3_cpu", "zero3_nvme")


@dataclass(frozen=True)
class Arm:
    """What an arm's files promise. `deepspeed` is the DeepSpeed config as written, None for arms without DeepSpeed."""

    name: str
    path: Path
    distributed_type: str
    num_processes: int | str
    deepspeed: dict | None

    @property
    def zero(self) -> dict:
        return (self.deepspeed or {}).get("zero_optimization", {})

    @property
    def stage(self) -> int | None:
        return self.zero.get("stage") if self.deepspeed else None

    @property
    def offload_optimizer(self) -> str:
        return self.zero.get("offload_optimizer", {}).get("device", "none")

    @property
    def offload_param(self) -> str:
        return self.zero.get("offload_param", {}).get("device", "none")

    @property
    def uses_nvme(self) -> bool:
        return "nvme" in (self.offload_optimizer, self.offload_param)

    @property
    def clipping(self) -> float:
        # A DeepSpeed config that is silent clips at 1.0 since 0.19; plain training does not clip.
        return self.deepspeed.get("gradient_clipping", 1.0) if self.deepspeed else 0.0


def read(path: Path) -> Arm:
    """The arm that a yaml file describes. What Accelerate is known to drop without a word is refused here."""
    try:
        config = yaml.safe_load(path.read_text())
    except OSError:
        raise Stop(f"there is no config file {path}", f"choose one of {', '.join(all_paths())}") from None
    except yaml.YAMLError as error:
        raise Stop(f"{path} is not valid yaml: {error}", "mend the file") from None
    if not isinstance(config, dict) or "distributed_type" not in config:
        raise Stop(f"{path} is not an Accelerate config: no distributed_type", "start from one in accelerate_configs/")
    if config["distributed_type"] not in DISTRIBUTED_TYPES:
        # FSDP without a GPU, for one, is DDP or an error, depending on how the script opens its Accelerator.
        raise Stop(
            f"{path.name} has distributed_type {config['distributed_type']}, which the study cannot read back yet",
            f"give one of {', '.join(DISTRIBUTED_TYPES)}",
        )
    deepspeed = (
        _deepspeed(path, config.get("deepspeed_config") or {}) if config["distributed_type"] == "DEEPSPEED" else None
    )
    if config.get("mixed_precision") not in (None, "no"):
        raise Stop(
            f"{path.name} sets mixed_precision, and precision is the run's affair here, alike in every arm",
            "take the line out and give --precision",
        )
    return Arm(path.stem, path, config["distributed_type"], config.get("num_processes", 1), deepspeed)


def _deepspeed(path: Path, section: dict) -> dict:
    """The DeepSpeed config an arm means: its json, or what Accelerate makes of the keys in the yaml itself."""
    if not isinstance(section, dict):
        raise Stop(f"{path.name}: deepspeed_config is {section!r}, and should be a list of keys", "mend the file")
    if file := section.get("deepspeed_config_file"):
        if twice := sorted(set(section) & set(SAID_BY_THE_JSON)):
            raise Stop(f"{path.name} sets {', '.join(twice)} beside a deepspeed_config_file", f"move it into {file}")
        target = find(file)
        try:
            config = json.loads(target.read_text())
            if not isinstance(config, dict):
                raise Stop(f"{target} is not a DeepSpeed config", "mend the file")
            return config
        except FileNotFoundError:
            raise Stop(f"{path.name} names {file}, which is not there", "run from the root of the repository") from None
        except json.JSONDecodeError as error:
            raise Stop(f"{target} is not valid JSON (line {error.lineno})", "mend the file") from None
    for key in ("offload_optimizer_nvme_path", "offload_param_nvme_path"):
        # Accelerate 1.15 reads the key and never hands it on: the files would land in ./none.
        if section.get(key) not in (None, "none"):
            raise Stop(f"{path.name} sets {key}, which Accelerate ignores", "take it out and give --nvme-dir")
    zero = {"stage": section.get("zero_stage", 2)}
    for part in ("optimizer", "param"):
        zero[f"offload_{part}"] = {"device": section.get(f"offload_{part}_device") or "none"}
    # Where the yaml is silent, Accelerate and DeepSpeed both clip at 1.0; a silent arm promises no more than that.
    return {"gradient_clipping": section.get("gradient_clipping", 1.0), "zero_optimization": zero}


def find(file: str | Path) -> Path:
    """A path that a config names: as seen from here, or else from the root of the repository."""
    return Path(file) if Path(file).exists() else ROOT / file


def all_paths() -> dict[str, Path]:
    """The nine arms in their order, then the variants."""
    variants = sorted((FOLDER / "variants").glob("*.yaml"))
    return {name: FOLDER / f"{name}.yaml" for name in NAMES} | {path.stem: path for path in variants}


def digest(name: str) -> str:
    """A short digest of what an arm's files say, comments aside: a run of an arm as it was is no run of it as it is."""
    arm = read(all_paths()[name])
    said = [arm.distributed_type, arm.num_processes, arm.deepspeed]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]
