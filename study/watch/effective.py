"""Find the effective settings of a config or a record, with the same names for all kinds of files.

`settings.toml` says where a kind of file has a setting. Here is what the libraries make of it: DeepSpeed 0.19.8,
Accelerate 1.15.0, Transformers 5.23.0. Settings that a file leaves to the script are not included.
"""

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from study.core.arms import OFFLOADS
from study.core.library_defaults import Library, sections
from study.core.settings import AUTOCAST
from study.records.schema import Record
from study.watch.sources import ACCELERATE, DEEPSPEED, TRAINER, Source

FILE = Path(__file__).with_name("settings.toml")
AUTO = "auto"
DEFAULTS: dict[Library, str] = {"deepspeed": "DeepSpeed's default", "trainer": "the Trainer's default"}
# TRL 1.16: keys that only one of its configs has, and the defaults in which it differs from the Trainer.
TRL = {
    "SFTConfig": (("packing", "completion_only_loss", "assistant_only_loss", "dataset_text_field"), 2e-5),
    "GRPOConfig": (("num_generations", "max_completion_length", "vllm_mode"), 1e-6),
}
ENGINES = {"NO": "one process", "MULTI_GPU": "DDP", "MULTI_CPU": "DDP", "DEEPSPEED": "DeepSpeed", "FSDP": "FSDP"}


class Description(BaseModel):
    """A setting by our name. The fields of the kinds of files are dotted paths."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
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
    content = tomllib.loads(FILE.read_text())
    return {name: Description(name=name, **fields) for name, fields in content.items()}


@dataclass(frozen=True)
class Setting:
    """A value, and its origin if it is not written in the file."""

    value: Any
    origin: str = ""


EffectiveSettings = dict[str, Setting]


def value_at(content: Any, path: str) -> Any:
    """Return the value at a dotted path, or None. The empty path is the content itself."""
    for name in path.split(".") if path else ():
        content = content.get(name) if isinstance(content, dict) else None
    return content


def _section(content: dict, name: str) -> dict:
    section = content.get(name)
    return section if isinstance(section, dict) else {}


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
    settings = {name: settings[name] for name in names if name in settings and settings[name].value is not None}
    factors = [settings.get(name) for name in ("rows per pass and rank", "accumulation", "ranks")]
    values = [factor.value for factor in factors if factor and type(factor.value) is int and factor.value]
    if "rows per step" not in settings and len(values) == 3:
        rows, passes, ranks = values
        product = Setting(rows * passes * ranks, f"{rows} rows x {passes} passes x {ranks} ranks")
        settings["rows per step"] = product
    return settings


def _written(kind: Literal["deepspeed", "accelerate", "trainer", "record"], content: dict) -> EffectiveSettings:
    """Return the settings that a file has. "auto" and null count as absent."""
    paths = {name: getattr(each, kind) for name, each in descriptions().items()}
    values = {name: value_at(content, path) for name, path in paths.items() if path}
    return {name: Setting(value) for name, value in values.items() if value not in (None, AUTO, "None")}


# --- DeepSpeed -----------------------------------------------------------------------------------------------------


def zero_section(config: dict) -> dict:
    """Return the section `zero_optimization`, with what DeepSpeed makes of its older forms: true, "3", cpu_offload."""
    if config.get("zero_optimization") is True:
        return {"stage": 1}
    zero = dict(_section(config, "zero_optimization"))
    if str(zero.get("stage")) in ("0", "1", "2", "3"):
        zero["stage"] = int(zero["stage"])
    for part, old in zip(OFFLOADS, ("cpu_offload", "cpu_offload_param"), strict=True):
        if zero.get(old) is True:
            zero[part] = {"device": "cpu"}
    return zero


def _of_deepspeed(config: dict) -> EffectiveSettings:
    zero = zero_section(config)
    known = sections("deepspeed")
    top = known[""] | {f"zero_optimization.{key}": value for key, value in known["zero_optimization"].items()}
    defaults = {name: top.get(each.deepspeed or "") for name, each in descriptions().items()}
    settings = {name: Setting(value, DEFAULTS["deepspeed"]) for name, value in defaults.items() if value is not None}
    settings |= {"engine": Setting("DeepSpeed")} | _written("deepspeed", config | {"zero_optimization": zero})
    settings |= {name: Setting(AUTO, "from the hidden size") for name in settings if zero.get(name) == AUTO}
    stage = settings["stage"].value
    if zero.get("overlap_comm") is None:
        settings["overlap_comm"] = Setting(stage == 3, DEFAULTS["deepspeed"])
    if stage != 3:
        settings = {name: setting for name, setting in settings.items() if not name.startswith("stage3_")}
    for part in OFFLOADS:
        device = "none" if zero.get(part) is None else _section(zero, part).get("device", "cpu")
        settings[part] = Setting(device)
        if device == "nvme" and stage != 3:
            settings[part] = Setting("cpu", "stages 1 and 2 take nvme for cpu")
    clipping = config.get("gradient_clipping")
    if clipping is None or clipping == AUTO:
        filled = "auto: Accelerate fills in 1.0, the Trainer its max_grad_norm"
        unwritten = "not written: DeepSpeed's default is 1.0 since June 2026 (PR 8068), and was 0"
        settings["clipping"] = Setting(settings["clipping"].value, filled if clipping else unwritten)
    return settings | {"precision": cast_of(config)} | _loss_scale(config) | _adam(config)


def cast_of(config: dict) -> Setting:
    """Return the precision. Its value is None if the script fills it in."""
    for name, dtype in reversed(AUTOCAST.items()):
        if _section(config, name).get("enabled") is True:
            return Setting(f"cast to {dtype}", "DeepSpeed casts the weights")
    autocast = _section(config, "torch_autocast")
    if autocast.get("enabled") is True:
        return Setting(f"autocast to {autocast.get('dtype', 'bfloat16')}")
    if any(_section(config, name).get("enabled") == AUTO for name in AUTOCAST):
        return Setting(None)
    return Setting("fp32", "no section switches another on")


def _loss_scale(config: dict) -> EffectiveSettings:
    fp16 = sections("deepspeed")["fp16"] | _section(config, "fp16")
    if fp16["enabled"] is not True:
        return {}
    growing = f"from 2^{fp16['initial_scale_power']}, doubled after {fp16['loss_scale_window']} steps"
    return {"loss scale": Setting(f"fixed at {fp16['loss_scale']}" if fp16["loss_scale"] else growing)}


def _adam(config: dict) -> EffectiveSettings:
    """Return the optimizer. DeepSpeed has two kinds of Adam under one name."""
    section = _section(config, "optimizer")
    kind = section.get("type")
    if str(kind).lower() != "adam":
        return {"optimizer": Setting(kind)} if kind else {}
    decay = "decoupled decay: AdamW" if _section(section, "params").get("adam_w_mode", True) else "L2 decay"
    return {"optimizer": Setting(f"{kind} ({decay})", "DeepSpeed's Adam is AdamW unless adam_w_mode is false")}


# --- Accelerate ----------------------------------------------------------------------------------------------------


def _of_accelerate(source: Source) -> EffectiveSettings:
    config = source.content
    kind = str(config.get("distributed_type") or "NO")  # yaml reads an unquoted NO as false
    half = str(config.get("mixed_precision") or "no")
    settings: EffectiveSettings = {}
    if kind == "DEEPSPEED":
        settings = _deepspeed_beside_yaml(source)
    elif "gradient_accumulation_steps" in config:
        settings["accumulation"] = Setting(config["gradient_accumulation_steps"])
    if kind != "FSDP":  # its section is not read
        config = config | {"fsdp_config": None}
    settings |= _written("accelerate", config) | {"engine": Setting(ENGINES.get(kind, kind))}
    settings |= _precision(settings, half, kind == "DEEPSPEED", Setting("fp32", "as the model was loaded"))
    if config.get("fsdp_config"):
        settings |= _fsdp(config["fsdp_config"], half)
    if dynamo := value_at(config, "dynamo_config.dynamo_backend"):
        settings["compiled"] = Setting(str(dynamo).upper() != "NO")
    return settings


def _precision(settings: EffectiveSettings, half: str, is_deepspeed: bool, full: Setting) -> EffectiveSettings:
    """Return the precision that `mixed_precision` makes, unless the DeepSpeed config says another."""
    written = settings.get("precision", Setting(None)).value
    if half != "no" and written in (None, "fp32"):
        return {"precision": Setting(f"{'cast' if is_deepspeed else 'autocast'} to {AUTOCAST.get(half, half)}")}
    return {} if is_deepspeed else {"precision": full}


def _deepspeed_beside_yaml(source: Source) -> EffectiveSettings:
    if source.named:
        return _of_deepspeed(source.named.content)
    if source.unread:
        return {}
    section = _section(source.content, "deepspeed_config")
    settings = _of_deepspeed(config_of_yaml(section))
    if section.get("gradient_clipping") == 0:
        origin = "the yaml says 0: Accelerate drops it, and DeepSpeed's default is 1.0"
        settings["clipping"] = Setting(sections("deepspeed")[""]["gradient_clipping"], origin)
    return settings


def config_of_yaml(section: dict) -> dict:
    """Return the DeepSpeed config that Accelerate makes of the keys in its yaml."""
    zero: dict = {"stage": section.get("zero_stage", 2)}
    for part in OFFLOADS:
        device = section.get(f"{part}_device")
        if device not in (None, "none"):
            zero[part] = {"device": device}
    names = ("gradient_clipping", "gradient_accumulation_steps")
    return {"zero_optimization": zero} | {name: section[name] for name in names if section.get(name) is not None}


def _fsdp(section: dict, half: str) -> EffectiveSettings:
    sharding = section.get("fsdp_reshard_after_forward", section.get("fsdp_sharding_strategy"))
    if isinstance(sharding, bool):
        sharding = "FULL_SHARD" if sharding else "SHARD_GRAD_OP"
    home = section.get("fsdp_offload_params")
    if isinstance(home, bool):
        home = "cpu" if home else "none"
    settings = {"sharding": Setting(sharding), "offload_param": Setting(home)}
    if half != "no":
        settings["weights"] = Setting("float32", "FSDP's mixed precision upcasts what is trained")
    return settings


# --- the Trainer ---------------------------------------------------------------------------------------------------


def _of_trl(arguments: dict) -> tuple[str, dict]:
    """Return the name of the config of TRL that has these arguments, and its defaults for what they leave out."""
    for name, (keys, rate) in TRL.items():
        if any(key in arguments for key in keys):
            defaults = {"gradient_checkpointing": True, "bf16": not arguments.get("fp16"), "learning_rate": rate}
            return name, {key: value for key, value in defaults.items() if arguments.get(key) is None}
    return "", {}


def _of_trainer(source: Source) -> EffectiveSettings:
    config, defaults = _of_trl(source.content)
    arguments = source.content | defaults
    is_trainer = source.kind == TRAINER
    is_deepspeed = bool(source.named or arguments.get("deepspeed"))
    given = _of_deepspeed(source.named.content) if source.named else {}
    by_default = {
        name: Setting(each.value, f"{config}'s default") for name, each in _written("trainer", defaults).items()
    }
    written = _written("trainer", source.content) | by_default
    steps = arguments.get("max_steps") or 0
    written |= {"steps": Setting(steps)} if steps > 0 else {"epochs": Setting(arguments.get("num_train_epochs"))}
    if str(arguments.get("optim", "")).startswith("adamw_torch"):
        written["optimizer"] = Setting("AdamW")
    if "optimizer" in given:  # the json's counts
        written.pop("optimizer", None)
    betas = [arguments.get("adam_beta1"), arguments.get("adam_beta2")]
    if None not in betas:
        written["betas"] = Setting(betas)
    settings = given | written | _trainer_clipping(source)
    if is_trainer and not is_deepspeed:
        settings["engine"] = Setting("FSDP" if arguments.get("fsdp") else "DDP, or one process")
    half = next((name for name in AUTOCAST if arguments.get(name) is True), "no")
    full = Setting("fp32", DEFAULTS["trainer"]) if is_trainer else Setting(None)
    return settings | _precision(settings, half, is_deepspeed, full)


def _trainer_clipping(source: Source) -> EffectiveSettings:
    default = sections("trainer")[""]["max_grad_norm"]
    clipping = source.content.get("max_grad_norm")
    if source.named:
        if source.named.content.get("gradient_clipping") != AUTO:
            return {}
        return {"clipping": Setting(default if clipping is None else clipping, "max_grad_norm, as the json says auto")}
    if source.kind != TRAINER or source.content.get("deepspeed"):
        return {}
    return {"clipping": Setting(default, DEFAULTS["trainer"]) if clipping is None else Setting(clipping)}


# --- a record ------------------------------------------------------------------------------------------------------


def _of_record(record: Record, content: dict) -> EffectiveSettings:
    seen = record.observed
    kind = seen.distributed_type or ""
    engine = "FSDP" if "FSDP" in kind else ENGINES.get(kind, "DDP" if kind else None)
    own = _written("record", content) | {"engine": Setting(engine), "precision": _precision_of_record(record)}
    if seen.stage is None:
        own = {name: setting for name, setting in own.items() if name not in ("overlap_comm", *OFFLOADS)}
    # The values that were read back from the prepared objects take precedence over the config.
    settings = _of_deepspeed(seen.deepspeed) if seen.deepspeed else {}
    settings |= {name: setting for name, setting in own.items() if setting.value is not None}
    return settings | {f"version of {name}": Setting(version) for name, version in record.software.items()}


def _precision_of_record(record: Record) -> Setting:
    autocast = record.observed.autocast
    weights = record.observed.dtypes.get("weights")
    if autocast in AUTOCAST:
        return Setting(f"autocast to {AUTOCAST[autocast]}")
    if weights is None:
        return Setting(None)
    return Setting("fp32" if weights == "float32" else f"cast to {weights}")
