"""Find what a script, its config files and its launcher ask for before anything is prepared."""

import contextlib
import os
from pathlib import Path
from typing import Any

from study.core import launcher
from study.core.arms import OFFLOADS
from study.core.errors import Stop
from study.core.settings import AUTOCAST
from study.records.schema import Promised
from study.watch import sources
from study.watch.effective import zero_section

# `accelerate launch` also sets its own defaults. ACCELERATE_CONFIG_DS_FIELDS names the keys that the yaml has.
FIELDS = {"clipping": "gradient_clipping", "accumulation": "gradient_accumulation_steps"}


def intended_settings(engine_config: dict | None, arguments=None) -> Promised:
    """Return what was asked for, by the most explicit source: a Trainer, the script's own config, or the launcher.

    `arguments` are transformers.TrainingArguments. `engine_config` is what a script without Accelerate gave DeepSpeed.
    """
    if engine_config is not None:
        wanted = {"source": "the script's DeepSpeed config", "deepspeed": True} | _of_deepspeed(engine_config)
    else:
        wanted = _of_launcher()
    if arguments is not None:
        wanted |= _of_trainer(arguments, wanted)
    wanted["ranks"] = _number(os.environ.get("WORLD_SIZE"))
    return Promised.model_validate(wanted)


def _of_launcher() -> dict[str, Any]:
    """Return what the environment of `accelerate launch` asks for; nothing without it."""
    seen = {name.removeprefix("ACCELERATE_"): value for name, value in os.environ.items()}
    if "MIXED_PRECISION" not in seen:
        return {}
    file = launcher.config_file()
    wanted: dict[str, Any] = {
        "source": file.name if file else "Accelerate's environment",
        "deepspeed": seen.get("USE_DEEPSPEED") == "true",
        "fsdp": seen.get("USE_FSDP") == "true",
        "precision": seen["MIXED_PRECISION"],
    }
    if not wanted["deepspeed"]:
        return wanted
    if path := seen.get("DEEPSPEED_CONFIG_FILE"):  # Accelerate's precision is then the file's
        return wanted | {"source": Path(path).name} | _of_deepspeed(_content(path))
    written = seen.get("CONFIG_DS_FIELDS", "").split(",")
    wanted |= {ours: _number(seen.get(key.upper())) for ours, key in FIELDS.items() if key in written}
    wanted |= {part: seen.get(f"DEEPSPEED_{part.upper()}_DEVICE") for part in OFFLOADS}
    return wanted | {"stage": _number(seen.get("DEEPSPEED_ZERO_STAGE"))}


def _of_trainer(arguments, launched: dict[str, Any]) -> dict[str, Any]:
    """Return what TrainingArguments ask for. Numbers in a DeepSpeed config take precedence."""
    wanted = {
        "source": "TrainingArguments",
        "clipping": float(arguments.max_grad_norm or 0),
        "precision": next((name for name in AUTOCAST if getattr(arguments, name)), "no"),
        "accumulation": arguments.gradient_accumulation_steps,
        "checkpointing": arguments.gradient_checkpointing,
    }
    config: dict[str, Any] = {}
    if arguments.deepspeed:
        config = {"deepspeed": True} | _of_deepspeed(_content(arguments.deepspeed))
    elif launched.get("deepspeed"):  # the Trainer then takes the launcher's config
        config = launched | {"precision": None}
    return wanted | {name: value for name, value in config.items() if value is not None}


def _of_deepspeed(config: dict) -> dict[str, Any]:
    """Return what a DeepSpeed config asks for. "auto" asks for nothing."""
    zero = zero_section(config)
    wanted: dict[str, Any] = {ours: _number(config.get(key)) for ours, key in FIELDS.items()}
    wanted |= {part: (zero.get(part) or {}).get("device", "none") for part in OFFLOADS}
    precision = next((name for name in AUTOCAST if (config.get(name) or {}).get("enabled") is True), None)
    return wanted | {"stage": _number(zero.get("stage", 0)), "precision": precision}


def _content(config: dict | str | Path) -> dict:
    if isinstance(config, dict):
        return config
    with contextlib.suppress(Stop):
        return sources.read(Path(config)).content
    return {}


def _number(value) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):  # "auto", "none", or nothing
        return None
