"""Find the effective settings of a config or a record, with the same names for all kinds of files.

`settings.toml` says where a kind of file has a setting. Absent keys have the defaults of the libraries' own classes.
Here is what the libraries make of the rest: DeepSpeed 0.19.8, Accelerate 1.15.0, Transformers 5.23.0. What a file
leaves to the script is not included: keys that are null or "auto".
"""

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from study.core.arms import OFFLOADS
from study.core.library_defaults import sections
from study.core.settings import AUTOCAST
from study.records.schema import Record
from study.watch.sources import ACCELERATE, DEEPSPEED, TRAINER, Source

AUTO = "auto"
ENGINES = {"NO": "one process", "MULTI_GPU": "DDP", "MULTI_CPU": "DDP", "DEEPSPEED": "DeepSpeed", "FSDP": "FSDP"}
Kind = Literal["deepspeed", "accelerate", "trainer", "record"]


class Description(BaseModel):
    """A setting by our name. The fields of the kinds of files are dotted paths."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    changes: str | None = None  # None: not known to change losses or memory
    why: str = ""
    unless: str | int | bool | None = None  # another value counts even if only one file has the setting
    deepspeed: str | None = None
    accelerate: str | None = None
    trainer: str | None = None
    record: str | None = None
    keys: tuple[str, ...] = ()


@functools.cache
def descriptions() -> dict[str, Description]:
    """Return all descriptions by name. The settings that matter most come first."""
    content = tomllib.loads(Path(__file__).with_name("settings.toml").read_text())
    return {name: Description(**fields) for name, fields in content.items()}


@dataclass(frozen=True)
class Setting:
    value: Any
    is_default: bool = False  # of the library: the file does not have the key


EffectiveSettings = dict[str, Setting]


def value_at(content: Any, path: str) -> Any:
    """Return the value at a dotted path, or None. The empty path is the content itself."""
    for name in path.split(".") if path else ():
        content = content.get(name) if isinstance(content, dict) else None
    return content


def effective_settings(source: Source) -> EffectiveSettings:
    """Return the effective settings by our names, those that matter most first."""
    if source.record is not None:
        settings = _of_record(source.record, source.content)
    elif source.kind == DEEPSPEED:
        settings = _of_deepspeed(source.content)
    elif source.kind == ACCELERATE:
        settings = _of_accelerate(source)
    else:  # files of other programs often use the Trainer's names
        settings = _of_trainer(source)
    names = dict.fromkeys((*descriptions(), *settings))
    return {name: settings[name] for name in names if name in settings and settings[name].value is not None}


def _at_paths(kind: Kind, content: dict, defaults: dict[str, Any] | None = None) -> EffectiveSettings:
    """Return the settings that a file of this kind has, and the defaults, by dotted path, of those that it lacks."""
    settings = {}
    for name, description in descriptions().items():
        path = getattr(description, kind)
        written = value_at(content, path) if path else AUTO
        if written in (None, "None"):
            settings[name] = Setting((defaults or {}).get(path), is_default=True)
        elif written != AUTO:
            settings[name] = Setting(written)
    return {name: setting for name, setting in settings.items() if setting.value is not None}


def zero_section(config: dict) -> dict:
    """Return the section `zero_optimization`, with what DeepSpeed makes of its older form, cpu_offload."""
    section = config.get("zero_optimization")
    zero = dict(section) if isinstance(section, dict) else {}
    if zero.get("cpu_offload") is True:
        zero["offload_optimizer"] = {"device": "cpu"}
    return zero


def _of_deepspeed(config: dict) -> EffectiveSettings:
    zero = zero_section(config)
    known = sections("deepspeed").items()
    defaults = {f"{path}.{key}".lstrip("."): value for path, section in known for key, value in section.items()}
    is_stage3 = zero.get("stage") == 3
    settings = {"overlap_comm": Setting(is_stage3, is_default=True)}
    settings |= _at_paths("deepspeed", config | {"zero_optimization": zero}, defaults)
    if not is_stage3:
        settings = {name: setting for name, setting in settings.items() if not name.startswith("stage3_")}
        nvme = [part for part in OFFLOADS if settings[part].value == "nvme"]
        settings |= dict.fromkeys(nvme, Setting("cpu"))  # stages 1 and 2 take nvme for cpu
    return settings | {"engine": Setting("DeepSpeed"), "precision": Setting(cast_of(config))}


def cast_of(config: dict) -> str | None:
    """Return the precision of a DeepSpeed config. None if the script fills it in."""
    for name, dtype in reversed(AUTOCAST.items()):
        if value_at(config, f"{name}.enabled") is True:
            return f"cast to {dtype}"
    if value_at(config, "torch_autocast.enabled") is True:
        return f"autocast to {value_at(config, 'torch_autocast.dtype') or 'bfloat16'}"
    is_auto = any(value_at(config, f"{name}.enabled") == AUTO for name in AUTOCAST)
    return None if is_auto else "fp32"


def _mixed(half: str, settings: EffectiveSettings) -> EffectiveSettings:
    """Return what `mixed_precision` or the Trainer's flag makes of the precision. A DeepSpeed config's own counts."""
    if "stage" not in settings:
        return {"precision": Setting("fp32" if half == "no" else f"autocast to {AUTOCAST.get(half, half)}")}
    if half != "no" and settings["precision"].value in (None, "fp32"):
        return {"precision": Setting(f"cast to {AUTOCAST.get(half, half)}")}
    return {}


def _of_accelerate(source: Source) -> EffectiveSettings:
    config = source.content
    kind = str(config.get("distributed_type") or "NO")  # yaml reads an unquoted NO as false
    half = str(config.get("mixed_precision") or "no")
    if kind != "FSDP":  # its section is not read
        config = config | {"fsdp_config": None}
    settings = _at_paths("accelerate", config)
    if kind == "DEEPSPEED" and source.unread is None:
        made = config_of_yaml(config.get("deepspeed_config") or {})
        settings = _of_deepspeed(source.named.content if source.named else made) | settings
    settings |= {"engine": Setting(ENGINES.get(kind, kind))}
    if kind != "DEEPSPEED" or "stage" in settings:
        settings |= _mixed(half, settings)
    return settings


def config_of_yaml(section: dict) -> dict:
    """Return the DeepSpeed config that Accelerate makes of the keys in its yaml. It drops a clipping of 0."""
    zero: dict = {"stage": section.get("zero_stage", 2)}
    for part in OFFLOADS:
        device = section.get(f"{part}_device")
        if device not in (None, "none"):
            zero[part] = {"device": device}
    names = ("gradient_clipping", "gradient_accumulation_steps")
    return {"zero_optimization": zero} | {name: section[name] for name in names if section.get(name)}


def _of_trainer(source: Source) -> EffectiveSettings:
    arguments = source.content
    half = next((name for name in AUTOCAST if arguments.get(name) is True), "no")
    is_trainer = source.kind == TRAINER
    settings = _at_paths("trainer", arguments, sections("trainer")[""] if is_trainer else None)
    if source.named:  # the DeepSpeed config's numbers count
        settings |= _of_deepspeed(source.named.content)
    elif is_trainer:
        settings["engine"] = Setting("FSDP" if arguments.get("fsdp") else "DDP, or one process")
    if is_trainer or half != "no":
        settings |= _mixed(half, settings)
    return settings


def _of_record(record: Record, content: dict) -> EffectiveSettings:
    seen = record.observed
    kind = seen.distributed_type or ""
    weights = seen.dtypes.get("weights")
    own = _at_paths("record", content)
    if seen.autocast in AUTOCAST:
        own["precision"] = Setting(f"autocast to {AUTOCAST[seen.autocast]}")
    elif weights is not None:
        own["precision"] = Setting("fp32" if weights == "float32" else f"cast to {weights}")
    if kind:
        own["engine"] = Setting("FSDP" if "FSDP" in kind else ENGINES.get(kind, "DDP"))
    # The values that were read back from the prepared objects take precedence over the config.
    settings = (_of_deepspeed(seen.deepspeed) if seen.deepspeed else {}) | own
    return settings | {f"version of {name}": Setting(version) for name, version in record.software.items()}
