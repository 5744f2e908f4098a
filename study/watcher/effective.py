"""Find the effective settings of a config or a record, with the same names for all kinds of files.

`settings.toml` says where a kind of file has a setting. Here is what the libraries make of it: DeepSpeed 0.19.8,
Accelerate 1.15.0, Transformers 5.23.0. Settings that a file leaves to the script are not included.
"""

from dataclasses import dataclass
from typing import Any

from study.records.schema import Record
from study.spec.arms import OFFLOADS
from study.spec.library_defaults import Library, sections
from study.spec.settings import AUTOCAST
from study.watcher.descriptions import Kind, descriptions, value_at
from study.watcher.sources import ACCELERATE, DEEPSPEED, TRAINER, Source

AUTO = "auto"
DEFAULTS: dict[Library, str] = {"deepspeed": "DeepSpeed's default", "trainer": "the Trainer's default"}
CLIPS = "not written: DeepSpeed's default is 1.0 since June 2026 (PR 8068), and was 0"
CAST = "cast to"
AUTOCASTS = "autocast to"
ENGINES = {"NO": "one process", "MULTI_GPU": "DDP", "MULTI_CPU": "DDP", "DEEPSPEED": "DeepSpeed", "FSDP": "FSDP"}


@dataclass(frozen=True)
class Setting:
    """A value, and its origin if it is not written in the file."""

    value: Any
    origin: str = ""


EffectiveSettings = dict[str, Setting]


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
    settings = {name: settings[name] for name in (*descriptions(), *settings) if name in settings}
    return {name: setting for name, setting in settings.items() if setting.value is not None}


def _written(kind: Kind, content: dict) -> EffectiveSettings:
    """Return the settings that a file has. "auto" and null count as absent."""
    paths = {name: each.path(kind) for name, each in descriptions().items()}
    values = {name: value_at(content, path) for name, path in paths.items() if path}
    return {name: Setting(value) for name, value in values.items() if value not in (None, AUTO, "None")}


def _defaults(library: Library) -> EffectiveSettings:
    settings = {}
    for name, each in descriptions().items():
        section, _, key = (each.path(library) or "").rpartition(".")
        value = sections(library).get(section, {}).get(key)
        if value is not None:
            settings[name] = Setting(value, DEFAULTS[library])
    return settings


def _section(content: dict, name: str) -> dict:
    section = content.get(name)
    return section if isinstance(section, dict) else {}


# --- DeepSpeed -----------------------------------------------------------------------------------------------------


def of_zero(config: dict) -> dict:
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
    zero = of_zero(config)
    config = config | {"zero_optimization": zero}
    settings = _defaults("deepspeed") | {"engine": Setting("DeepSpeed")} | _written("deepspeed", config)
    settings |= {name: Setting(AUTO, "from the hidden size") for name in settings if zero.get(name) == AUTO}
    stage = settings["stage"].value
    if zero.get("overlap_comm") is None:
        settings["overlap_comm"] = Setting(stage == 3, DEFAULTS["deepspeed"])
    if stage != 3:
        settings = {name: setting for name, setting in settings.items() if not name.startswith("stage3_")}
    settings |= {part: _home(zero, part, stage) for part in OFFLOADS}
    default = settings["clipping"].value
    if config.get("gradient_clipping") == AUTO:
        settings["clipping"] = Setting(default, "auto: Accelerate fills in 1.0, the Trainer its max_grad_norm")
    elif config.get("gradient_clipping") is None:
        settings["clipping"] = Setting(default, CLIPS)
    return settings | {"precision": _cast(config)} | _loss_scale(config) | _adam(config)


def _home(zero: dict, part: str, stage: Any) -> Setting:
    """Return where the optimizer states or the weights are."""
    if zero.get(part) is None:
        return Setting("none")
    device = _section(zero, part).get("device", "cpu")
    if device == "nvme" and stage != 3:
        return Setting("cpu", "stages 1 and 2 take nvme for cpu")
    return Setting(device)


def _cast(config: dict) -> Setting:
    """Return the precision. Its value is None if the script fills it in."""
    for name, dtype in reversed(AUTOCAST.items()):
        if _section(config, name).get("enabled") is True:
            return Setting(f"{CAST} {dtype}", "DeepSpeed casts the weights")
    autocast = _section(config, "torch_autocast")
    if autocast.get("enabled") is True:
        return Setting(f"{AUTOCASTS} {autocast.get('dtype', 'bfloat16')}")
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
    if not kind:
        return {}
    if str(kind).lower() != "adam":
        return {"optimizer": Setting(kind)}
    decoupled = _section(section, "params").get("adam_w_mode", True)
    decay = "decoupled decay: AdamW" if decoupled else "L2 decay"
    return {"optimizer": Setting(f"{kind} ({decay})", "DeepSpeed's Adam is AdamW unless adam_w_mode is false")}


# --- Accelerate ----------------------------------------------------------------------------------------------------


def _of_accelerate(source: Source) -> EffectiveSettings:
    config = source.content
    kind = config.get("distributed_type") or "NO"  # yaml reads an unquoted NO as false
    is_deepspeed = kind == "DEEPSPEED"
    settings = _deepspeed_of_yaml(source) if is_deepspeed else {}
    if kind != "FSDP":  # its section is not read
        config = config | {"fsdp_config": None}
    settings |= _written("accelerate", config) | {"engine": Setting(ENGINES.get(str(kind), str(kind)))}
    if "gradient_accumulation_steps" in config and not is_deepspeed:
        settings["accumulation"] = Setting(config["gradient_accumulation_steps"])
    half = str(config.get("mixed_precision") or "no")
    settings |= _precision(settings, half, is_deepspeed, Setting("fp32", "as the model was loaded"))
    if config.get("fsdp_config"):
        settings |= _fsdp(config["fsdp_config"], half)
    if dynamo := value_at(config, "dynamo_config.dynamo_backend"):
        settings["compiled"] = Setting(str(dynamo).upper() != "NO")
    return settings


def _precision(settings: EffectiveSettings, half: str, is_deepspeed: bool, full: Setting) -> EffectiveSettings:
    """Return the precision that `mixed_precision` makes, unless the DeepSpeed config says another."""
    said = settings.get("precision", Setting(None)).value
    if half != "no" and said in (None, "fp32"):
        return {"precision": Setting(f"{CAST if is_deepspeed else AUTOCASTS} {AUTOCAST.get(half, half)}")}
    return {} if is_deepspeed else {"precision": full}


def _deepspeed_of_yaml(source: Source) -> EffectiveSettings:
    if source.unread:
        return {}
    if source.named:
        return _of_deepspeed(source.named.content)
    section = _section(source.content, "deepspeed_config")
    settings = _of_deepspeed(of_yaml(section))
    if section.get("gradient_clipping") == 0:
        default = sections("deepspeed")[""]["gradient_clipping"]
        origin = "the yaml says 0: Accelerate drops it, and DeepSpeed's default is 1.0"
        settings["clipping"] = Setting(default, origin)
    return settings


def of_yaml(section: dict) -> dict:
    """Return the DeepSpeed config that Accelerate makes of the keys in its yaml."""
    zero: dict = {"stage": section.get("zero_stage", 2)}
    for part in OFFLOADS:
        device = section.get(f"{part}_device")
        if device not in (None, "none"):
            zero[part] = {"device": device}
    names = ("gradient_clipping", "gradient_accumulation_steps")
    return {"zero_optimization": zero} | {name: section[name] for name in names if section.get(name) is not None}


def _fsdp(section: dict, half: str) -> EffectiveSettings:
    words: dict[str, dict] = {
        "sharding": {False: "SHARD_GRAD_OP", True: "FULL_SHARD"},
        "offload_param": {False: "none", True: "cpu"},
    }
    values = {
        "sharding": section.get("fsdp_reshard_after_forward", section.get("fsdp_sharding_strategy")),
        "offload_param": section.get("fsdp_offload_params"),
    }
    settings = {
        name: Setting(words[name][value] if isinstance(value, bool) else value) for name, value in values.items()
    }
    if half != "no":
        settings["weights"] = Setting("float32", "FSDP's mixed precision upcasts what is trained")
    return settings


# --- the Trainer ---------------------------------------------------------------------------------------------------


def _of_trainer(source: Source) -> EffectiveSettings:
    arguments = source.content
    is_deepspeed = bool(source.named or arguments.get("deepspeed"))
    given = _of_deepspeed(source.named.content) if source.named else {}
    written = _written("trainer", arguments) | _duration(arguments)
    for name in {"rows per pass and rank", "accumulation"} & written.keys() & given.keys():
        ours = given[name].value
        theirs = written[name].value
        if ours != theirs:
            written[name] = Setting(theirs, f"the json says {ours}: the Trainer refuses the pair")
    if str(arguments.get("optim", "")).startswith("adamw_torch"):
        written["optimizer"] = Setting("AdamW")
    if "optimizer" in given:  # the json's counts
        written.pop("optimizer", None)
    betas = [arguments.get("adam_beta1"), arguments.get("adam_beta2")]
    if None not in betas:
        written["betas"] = Setting(betas)
    settings = given | written | _trainer_clipping(source)
    half = next((name for name in ("bf16", "fp16") if arguments.get(name) is True), "no")
    if source.kind == TRAINER and not is_deepspeed:
        settings["engine"] = Setting("FSDP" if arguments.get("fsdp") else "DDP, or one process")
    full = Setting("fp32", DEFAULTS["trainer"]) if source.kind == TRAINER else Setting(None)
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


def _duration(arguments: dict) -> EffectiveSettings:
    if (arguments.get("max_steps") or -1) > 0:
        return {"steps": Setting(arguments["max_steps"])}
    return {"epochs": Setting(arguments.get("num_train_epochs"))}


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
        return Setting(f"{AUTOCASTS} {AUTOCAST[autocast]}")
    if weights is None:
        return Setting(None)
    return Setting("fp32" if weights == "float32" else f"{CAST} {weights}")
