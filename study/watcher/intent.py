"""Reads what a script, its config files and its launcher ask for."""

import contextlib
import os
from pathlib import Path
from typing import Any

from study.io import files
from study.io import parsing as texts
from study.machine import launcher
from study.records.schema import Promised
from study.spec.settings import AUTOCAST
from study.watcher.effective import of_zero

MAX_BYTES = 64 * 1024
PRECISIONS = ("no", "bf16", "fp16", "fp8")
ENVIRONMENT = "Accelerate's environment"


def intended_settings(engine_config: dict | None, arguments=None) -> Promised:
    """Return what was asked for, by the most explicit source: a Trainer, the script's own config, or the launcher.

    `arguments` are transformers.TrainingArguments. `engine_config` is what a script without Accelerate gave DeepSpeed.
    """
    ranks = {"ranks": _number(os.environ.get("WORLD_SIZE"), int)}
    if engine_config is not None:
        own = {"source": "the script's DeepSpeed config", "deepspeed": True}
        return Promised(**ranks | own | _json(engine_config))
    launched = _launched()
    if arguments is None:
        return Promised(**ranks | launched)
    wanted = launched | _arguments(arguments)
    if launched.get("deepspeed") and not arguments.deepspeed:  # the Trainer then takes the launcher's DeepSpeed config
        wanted |= {name: value for name, value in launched.items() if value is not None and name != "precision"}
    return Promised(**ranks | wanted)


def _launched() -> dict:
    """Return what the environment of `accelerate launch` asks for; nothing without it."""
    seen = os.environ
    if "ACCELERATE_MIXED_PRECISION" not in seen:
        return {}
    file = launcher.config_file()
    wanted: dict[str, Any] = {"source": file.name if file else ENVIRONMENT}
    wanted |= {name: seen.get(f"ACCELERATE_USE_{name.upper()}") == "true" for name in ("deepspeed", "fsdp")}
    if (precision := seen["ACCELERATE_MIXED_PRECISION"]) in PRECISIONS:
        wanted["precision"] = precision
    if not wanted["deepspeed"]:
        return wanted
    if path := seen.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        return wanted | {"source": Path(path).name} | _json(_read(Path(path)))
    # `accelerate launch` also sets its own defaults. This list names the keys that the yaml has.
    written = seen.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    wanted["stage"] = _number(seen.get("ACCELERATE_DEEPSPEED_ZERO_STAGE"), int)
    if "gradient_clipping" in written:
        wanted["clipping"] = _number(seen.get("ACCELERATE_GRADIENT_CLIPPING"), float)
    if "gradient_accumulation_steps" in written:
        wanted["accumulation"] = _number(seen.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"), int)
    for part in ("offload_optimizer", "offload_param"):
        wanted[part] = seen.get(f"ACCELERATE_DEEPSPEED_{part.upper()}_DEVICE")
    return wanted


def _arguments(arguments) -> dict:
    """Return what TrainingArguments ask for. Numbers in their DeepSpeed config take precedence."""
    names = ("activation_checkpointing", "gradient_checkpointing")  # the second is the old name
    wanted = {
        "source": "TrainingArguments",
        "clipping": float(arguments.max_grad_norm or 0),
        "precision": next((name for name in AUTOCAST if getattr(arguments, name)), "no"),
        "accumulation": arguments.gradient_accumulation_steps,
        "checkpointing": any(getattr(arguments, name, False) for name in names),
    }
    if config := arguments.deepspeed:
        config = config if isinstance(config, dict) else _read(Path(config))
        wanted |= {"deepspeed": True} | {name: value for name, value in _json(config).items() if value is not None}
    return wanted


def _json(config: dict) -> dict:
    """Return what a DeepSpeed config asks for. "auto" asks for nothing."""
    zero = of_zero(config)
    wanted: dict[str, Any] = {
        "stage": _number(zero.get("stage", 0), int),
        "clipping": _number(config.get("gradient_clipping"), float),
        "accumulation": _number(config.get("gradient_accumulation_steps"), int),
    }
    for part in ("offload_optimizer", "offload_param"):
        wanted[part] = str((zero.get(part) or {}).get("device", "none"))
    autocast = config.get("torch_autocast") or {}
    if autocast.get("enabled") is True:
        wanted["precision"] = {dtype: name for name, dtype in AUTOCAST.items()}.get(str(autocast.get("dtype")))
    for name in ("bf16", "fp16"):
        if (config.get(name) or {}).get("enabled") is True:
            wanted["precision"] = name
    return wanted


def _read(path: Path) -> dict:
    with contextlib.suppress(OSError, ValueError):
        if isinstance(config := texts.from_json(files.read(path, MAX_BYTES)), dict):
            return config
    return {}


def _number(value, kind: type) -> int | float | None:
    try:
        return kind(value)
    except (TypeError, ValueError):  # "auto", "none", or nothing
        return None
