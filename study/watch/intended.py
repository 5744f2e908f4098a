"""Find what a script, its config files and its launcher ask for before anything is prepared."""

import contextlib
import os
from pathlib import Path
from typing import Any

from study.core import files, launcher, parsing
from study.core.arms import OFFLOADS
from study.core.settings import AUTOCAST
from study.records.schema import Promised
from study.watch.effective import cast_of, zero_section
from study.watch.sources import MAX_BYTES


def intended_settings(engine_config: dict | None, arguments=None) -> Promised:
    """Return what was asked for, by the most explicit source: a Trainer, the script's own config, or the launcher.

    `arguments` are transformers.TrainingArguments. `engine_config` is what a script without Accelerate gave DeepSpeed.
    """
    ranks = _number(os.environ.get("WORLD_SIZE"), int)
    if engine_config is not None:
        own = {"source": "the script's DeepSpeed config", "deepspeed": True}
        return Promised.model_validate({"ranks": ranks} | own | _asked_by_json(engine_config))
    launched = _asked_by_launcher()
    wanted = launched
    if arguments is not None:
        wanted = launched | _asked_by_arguments(arguments)
        if launched.get("deepspeed") and not arguments.deepspeed:  # the Trainer then takes the launcher's config
            wanted |= {name: value for name, value in launched.items() if value is not None and name != "precision"}
    return Promised.model_validate({"ranks": ranks} | wanted)


def _asked_by_launcher() -> dict[str, Any]:
    """Return what the environment of `accelerate launch` asks for; nothing without it."""
    seen = os.environ
    if "ACCELERATE_MIXED_PRECISION" not in seen:
        return {}
    file = launcher.config_file()
    precision = seen["ACCELERATE_MIXED_PRECISION"]
    wanted: dict[str, Any] = {
        "source": file.name if file else "Accelerate's environment",
        "deepspeed": seen.get("ACCELERATE_USE_DEEPSPEED") == "true",
        "fsdp": seen.get("ACCELERATE_USE_FSDP") == "true",
        "precision": precision if precision in ("no", "bf16", "fp16", "fp8") else None,
    }
    if not wanted["deepspeed"]:
        return wanted
    if path := seen.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        return wanted | {"source": Path(path).name} | _asked_by_json(_json_file(Path(path)))
    # `accelerate launch` also sets its own defaults. This list names the keys that the yaml has.
    written = seen.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    wanted["stage"] = _number(seen.get("ACCELERATE_DEEPSPEED_ZERO_STAGE"), int)
    if "gradient_clipping" in written:
        wanted["clipping"] = _number(seen.get("ACCELERATE_GRADIENT_CLIPPING"), float)
    if "gradient_accumulation_steps" in written:
        wanted["accumulation"] = _number(seen.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"), int)
    homes = {part: seen.get(f"ACCELERATE_DEEPSPEED_{part.upper()}_DEVICE") for part in OFFLOADS}
    return wanted | homes


def _asked_by_arguments(arguments) -> dict[str, Any]:
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
        json_values = _asked_by_json(config if isinstance(config, dict) else _json_file(Path(config)))
        wanted |= {"deepspeed": True} | {name: value for name, value in json_values.items() if value is not None}
    return wanted


def _asked_by_json(config: dict) -> dict[str, Any]:
    """Return what a DeepSpeed config asks for. "auto" asks for nothing."""
    zero = zero_section(config)
    wanted: dict[str, Any] = {
        "stage": _number(zero.get("stage", 0), int),
        "clipping": _number(config.get("gradient_clipping"), float),
        "accumulation": _number(config.get("gradient_accumulation_steps"), int),
    }
    wanted |= {part: str((zero.get(part) or {}).get("device", "none")) for part in OFFLOADS}
    cast = cast_of(config).value
    names = {dtype: name for name, dtype in AUTOCAST.items()}
    if cast and cast != "fp32":
        wanted["precision"] = names.get(cast.rpartition(" ")[2])
    return wanted


def _json_file(path: Path) -> dict:
    with contextlib.suppress(OSError, ValueError):
        if isinstance(config := parsing.from_json(files.read(path, MAX_BYTES)), dict):
            return config
    return {}


def _number(value, kind: type) -> int | float | None:
    try:
        return kind(value)
    except (TypeError, ValueError):  # "auto", "none", or nothing
        return None
