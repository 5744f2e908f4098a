"""What a config and a text say of a training whose memory was full, by our names of settings."""

import re
from pathlib import Path
from typing import Any

from study.configs.mistakes import recognised
from study.configs.pasted.read import Pasted
from study.configs.pasted.told import told
from study.configs.settings import AUTO, OFF, UNKNOWN, EffectiveSettings, effective_settings
from study.core.ignored_keys import OFFLOADS
from study.core.shapes import model_of_name

NUMBERS = ("ranks", "micro_batch", "sequence", "vocabulary", "lora_rank")
OUR_NAMES = {"sequences per micro-batch and rank": "micro_batch", "rank of the adapters": "lora_rank"}  # of settings
RECOMPUTING = ("checkpointing", "the Trainer's FSDP recomputing")
CHUNKING = "fused kernels (Liger)"  # with the Trainer's default kernels: one is the loss of chunks
OF_TEXT = ("ranks", "micro_batch", "sequence", "lora_rank")


def stated(pasted: Pasted) -> dict[str, Any]:
    """Return what a text says of its training, by our names of settings."""
    said = {name: pasted.said.get(name) or None for name in OF_TEXT}
    said["checkpointing"] = pasted.said.get("checkpointing")
    if pasted.said.get("machines", 1) > 1:
        said["ranks"] = None  # it may be the number of a node
    if pasted.said.get("offload", "none") != "none":
        said["offload_optimizer"] = pasted.said["offload"]
    said["adapters"] = pasted.said.get("peft")
    said["stage"] = pasted.said.get("stage")
    about = told(pasted.text)
    said["model"] = about.model
    said["gpu"] = about.gpu if about.gpu_bytes else None  # of which there is one size
    return {name: value for name, value in said.items() if value is not None}


def config_settings(path: Path | None) -> EffectiveSettings:
    """Return the settings of a config by our names, without those that something else decides.

    A script may recompute activations where the config has no such key.
    """
    known = {}
    for name, setting in (effective_settings(recognised(path)) if path else {}).items():
        is_unsaid = name in RECOMPUTING and setting.is_default and str(setting.value).lower() in OFF
        if setting.value not in (AUTO, UNKNOWN) and not is_unsaid:
            known[OUR_NAMES.get(name, name)] = setting
    return known


def understood(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with numbers as numbers, the model as we call it, and the arm that is nearest to them."""
    values = dict(settings)
    for name in NUMBERS:
        values[name] = _whole(values.get(name))
    values["checkpointing"] = _recomputes(values)
    values["chunked_loss"] = str(values.get(CHUNKING)).lower() not in OFF or None
    values["model"] = model_of_name(str(values.get("model")))
    values["arm"] = _nearest_arm(values)
    return values


def _whole(value: Any) -> int | None:
    """Return a whole number, which JSON and YAML may have in quotes."""
    return int(value) if re.fullmatch("[1-9][0-9]{0,8}", str(value)) else None


def _recomputes(values: dict[str, Any]) -> bool | None:
    """Return whether activations are recomputed. None: nobody says it."""
    # Of axolotl it may be a word, such as unsloth.
    if any(str(values.get(name)).lower() not in OFF for name in RECOMPUTING):
        return True
    return None if values.get("checkpointing") is None else False


def _nearest_arm(values: dict[str, Any]) -> str | None:
    engine, stage = values.get("engine"), str(values.get("stage"))
    if engine == "FSDP" or stage.startswith("FSDP"):
        return "fsdp2"
    if engine in (None, "DeepSpeed") and stage == "None":  # a file that is not here says it
        return None
    if stage not in ("1", "2", "3") or engine == "DDP":
        return "single" if values["ranks"] == 1 else "ddp"
    # A disk holds it as well as the host does: the GPU's part is the same.
    is_offloaded = any(values.get(part) not in (None, "none") for part in OFFLOADS)
    return f"zero{stage}_cpu" if is_offloaded else f"zero{stage}"
