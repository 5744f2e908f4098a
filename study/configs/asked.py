"""What the script of a watched run asks for: by a Trainer, its own config, or the launcher."""

import contextlib
import os
from pathlib import Path
from typing import Any

from study.configs.settings import ASKED, AUTO, at_paths, half_precision, zero_section
from study.configs.sources import read
from study.core import machine
from study.core.arms import config_of_yaml
from study.core.errors import Stop
from study.core.ignored_keys import OFFLOADS
from study.core.recipes import AUTOCAST
from study.records.sections import Promised


def intended_settings(engine_config: dict | None, arguments=None) -> Promised:
    """Return what was asked for, by the most explicit source: a Trainer, the script's own config, or the launcher.

    `arguments` are transformers.TrainingArguments. `engine_config` is what a script without Accelerate gave DeepSpeed.
    """
    # `accelerate launch` hands everything on as variables of the environment (accelerate/utils/launch.py:565).
    promised: dict[str, Any] = {}
    if engine_config is not None:
        promised = {"source": "the script's DeepSpeed config"} | _asked_of_deepspeed(engine_config)
    elif "ACCELERATE_MIXED_PRECISION" in os.environ:
        promised = _asked_of_launcher()
    if arguments is not None:
        promised = _asked_of_trainer(arguments, promised)
    return Promised.model_validate({"ranks": os.environ.get("WORLD_SIZE")} | promised)


def _asked_of_trainer(arguments, promised: dict[str, Any]) -> dict[str, Any]:
    """Return what a Trainer asks for: by a DeepSpeed config, and by its arguments where that is open."""
    config = {name: value for name, value in promised.items() if name != "precision"}  # which the Trainer replaces
    if arguments.deepspeed:
        config = _asked_of_deepspeed(_content(arguments.deepspeed))
    of_arguments = {
        "source": "TrainingArguments",
        "clipping": float(arguments.max_grad_norm or 0),
        "precision": half_precision(vars(arguments)) or "no",
        "accumulation": arguments.gradient_accumulation_steps,
        "checkpointing": arguments.gradient_checkpointing,
    }
    return of_arguments | config


def _asked_of_launcher() -> dict[str, Any]:
    """Return what the environment of `accelerate launch` asks for."""
    launched = {name.removeprefix("ACCELERATE_").lower(): value for name, value in os.environ.items()}
    file = machine.launcher_config()
    promised: dict[str, Any] = {
        "source": file.name if file else "Accelerate's environment",
        "deepspeed": launched.get("use_deepspeed") == "true",
        "fsdp": launched.get("use_fsdp") == "true",
        "precision": launched["mixed_precision"],
    }
    if not promised["deepspeed"]:
        return promised
    if path := launched.get("deepspeed_config_file"):  # Accelerate's precision is then the file's
        return promised | {"source": Path(path).name} | _asked_of_deepspeed(_content(path))
    # What neither the yaml nor an option such as --gradient_clipping says is not there, or none in older releases.
    section = {name.removeprefix("deepspeed_"): value for name, value in launched.items() if value != "none"}
    return _asked_of_deepspeed(config_of_yaml(section)) | promised


def _asked_of_deepspeed(config: dict) -> dict[str, Any]:
    """Return what a DeepSpeed config asks for. "auto" asks for nothing."""
    zero = {"stage": 0} | {part: {"device": "none"} for part in OFFLOADS} | zero_section(config)
    written = at_paths("deepspeed", config | {"zero_optimization": zero}, {})
    settings = {name: written[name].value for name in ASKED if name in written and written[name].value != AUTO}
    if (half := half_precision(config, "{}.enabled")) in AUTOCAST:
        settings["precision"] = half
    return {"deepspeed": True} | settings


def _content(config: dict | str | Path) -> dict:
    if isinstance(config, dict):
        return config
    with contextlib.suppress(Stop):
        return read(Path(config)).content
    return {}
