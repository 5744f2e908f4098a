"""The same script under another arm: its config with another stage, or with FSDP2 or DDP instead. Needs no torch."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from study.core.arms import Arm
from study.core.errors import Stop
from study.core.files import load
from study.core.ignored_keys import OFFLOADS
from study.records.sections import Observed
from study.rehearsal.launchers import options_of
from study.rehearsal.request import Request

CONFIG_WORDS = ("--deepspeed", "--deepspeed_config", "--fsdp", "--fsdp_config")  # of Trainers and launchers
# Options of `accelerate launch`, by how they begin, that say how a training is distributed: an arm says it in their
# place. The precision is none of it, and goes into the arm's config.
DISTRIBUTING = (
    *("use_", "multi_gpu", "cpu", "deepspeed", "zero", "offload", "fsdp", "megatron_lm", "parallelism_config"),
    "mixed_precision",
)
KEPT = ("gradient_accumulation_steps", "gradient_clipping")
MOST_BYTES = 2**20


def under(arm: Arm, request: Request, folder: Path) -> Request:
    """Return a request for the same script under an arm. Its config is written into the folder."""
    given = read(request.config_file) if request.config_file else {}
    words, json_file = without_config(request.words)
    section = given.get("deepspeed_config") or {}
    launch_options = options_of(request.launch_words)
    of_launch = {option.name: option.value for option in launch_options}
    json_file = json_file or of_launch.get("deepspeed_config_file") or section.get("deepspeed_config_file")
    zero = read(json_file) if json_file else None
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": 1,
        "mixed_precision": of_launch.get("mixed_precision") or given.get("mixed_precision") or precision(zero),
        "distributed_type": arm.distributed_type,
    }
    if arm.deepspeed is None:
        if arm.fsdp:
            config["fsdp_config"] = arm.fsdp
    elif zero is not None:
        (folder / "deepspeed.json").write_text(json.dumps(of_stage(zero, arm)))
        config["deepspeed_config"] = {"deepspeed_config_file": str(folder / "deepspeed.json")}
        del config["mixed_precision"]  # a DeepSpeed config has its own
    else:
        config["deepspeed_config"] = {key: section[key] for key in KEPT if key in section} | {
            "zero_stage": arm.stage,
            "offload_optimizer_device": arm.offload_optimizer,
            "offload_param_device": arm.offload_param,
            "zero3_init_flag": arm.stage == 3,
            "zero3_save_16bit_model": arm.stage == 3,
        }
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))  # which is YAML as well
    others = [option for option in launch_options if not option.name.startswith(DISTRIBUTING)]
    launch_words = [word for option in others for word in option.words]
    return replace(request, words=words, config_file=str(path), launch_words=launch_words)


def read(path: str | Path) -> dict:
    remedy = "name a readable config"
    return load(Path(path), dict, what="a config", remedy=remedy, most_bytes=MOST_BYTES, links=True)


def refuse_missing(config: Path) -> None:
    """Raise Stop for an Accelerate yaml that cannot be read, or whose DeepSpeed json is not where it says."""
    section = read(config).get("deepspeed_config")
    file = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    if isinstance(file, str) and not Path(file).is_file():
        remedy = "run in the folder from which that path counts, or write the whole path"
        raise Stop(f"{config} names {file!r:.200}, which is not here", remedy)


def without_config(words: list[str]) -> tuple[list[str], str | None]:
    """Return a script's words without those that name a config, and the DeepSpeed json that they named."""
    kept: list[str] = []
    json_file = None
    rest = iter(words)
    for word in rest:
        name, _, value = word.partition("=")
        if name not in CONFIG_WORDS:
            kept.append(word)
            continue
        value = value or next(rest, "")
        if "deepspeed" in name:
            json_file = value
    return kept, json_file


def precision(zero: dict | None) -> str:
    """Return the precision of a DeepSpeed config as Accelerate names it."""
    for name in ("bf16", "fp16"):
        if (zero or {}).get(name, {}).get("enabled") is True:
            return name
    return "no"


def of_stage(zero: dict, arm: Arm) -> dict:
    """Return a DeepSpeed config with the stage and the offloading of an arm, and otherwise its own settings."""
    section = {key: value for key, value in zero.get("zero_optimization", {}).items() if "offload" not in key}
    section |= {"stage": arm.stage}
    if arm.stage == 3:
        section.setdefault("stage3_gather_16bit_weights_on_model_save", True)
    for part in OFFLOADS:
        device = getattr(arm, part)
        if device != "none":
            section[part] = {"device": device}
    return zero | {"zero_optimization": section}


def check_is(arm: Arm, seen: Observed) -> None:
    """Raise Stop if a script has prepared something else, as it makes its own config."""
    sharded = seen.fsdp is not None or "Fully" in (seen.wrapper or "")
    if seen.stage != arm.stage or sharded != (arm.fsdp is not None):
        is_now = f"stage {seen.stage}" if seen.stage is not None else seen.wrapper or "one process"
        raise Stop(f"the script decides by itself, and trains with {is_now}", "change it there")
