"""Read anybody's config or record without trusting it, and recognise its kind by its keys."""

import contextlib
import functools
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from study.core import files, machine
from study.core.arms import OFFLOADS, library_defaults
from study.core.errors import Stop
from study.core.settings import AUTOCAST
from study.records import store
from study.records.schema import Record
from study.records.sections import Promised

MAX_BYTES = 1 << 20  # of a config: DeepSpeed's longest examples have 4 kB
RECORD = "record"
ACCELERATE = "Accelerate config"
DEEPSPEED = "DeepSpeed config"
TRAINER = "Trainer arguments"
OTHER = "settings"
NAMES_ANOTHER = {TRAINER: "deepspeed", ACCELERATE: "deepspeed_config.deepspeed_config_file"}  # where it names one
# A file has the kind with the most of its keys.
KEYS = {
    ACCELERATE: "distributed_type compute_environment mixed_precision deepspeed_config fsdp_config num_processes "
    "num_machines machine_rank main_training_function downcast_bf16 rdzv_backend use_cpu same_network",
    DEEPSPEED: "zero_optimization train_batch_size train_micro_batch_size_per_gpu zero_allow_untested_optimizer "
    "optimizer scheduler gradient_clipping steps_per_print wall_clock_breakdown torch_autocast amp",
    TRAINER: "per_device_train_batch_size output_dir learning_rate num_train_epochs max_steps max_grad_norm deepspeed "
    "lr_scheduler_type warmup_steps warmup_ratio gradient_checkpointing logging_steps save_steps weight_decay optim",
}


@dataclass(frozen=True)
class Source:
    """A config or a record. `content` is the content of the file; a config that the file names is in `named`."""

    path: Path
    kind: str
    content: dict
    record: Record | None = None
    named: "Source | None" = None
    unread: str | None = None  # why a file that it names is not in `named`

    @property
    def words(self) -> str:
        """The kind of file, in words."""
        return f"{self.kind} and {self.named.kind}" if self.named else self.kind


def read_config(path: Path) -> Source | None:
    """Return a config of a known kind; None for all other files, such as logs."""
    with contextlib.suppress(Stop):
        if path.suffix in (".json", ".yaml", ".yml") and (source := read(path)).kind in KEYS:
            return source
    return None


def read(path: Path) -> Source:
    """Read any config or record. A Stop says what is wrong with the file."""
    if path.is_dir():
        path /= store.RECORD
    content = {} if path.name == store.RECORD else _mapping(path)
    if path.name == store.RECORD or {"run_id", "observed"} <= content.keys():
        record = store.read(path)
        return Source(path, RECORD, record.model_dump(mode="json", by_alias=True), record)
    scores = {kind: len(content.keys() & set(keys.split())) for kind, keys in KEYS.items()} | {OTHER: 0.5}
    kind = max(scores, key=lambda kind: scores[kind])
    section = value_at(content, NAMES_ANOTHER.get(kind, "no other"))
    if isinstance(section, dict):
        return Source(path, kind, content, named=Source(path, DEEPSPEED, section))
    if not isinstance(section, str):
        return Source(path, kind, content)
    if file := _near(section, path):
        return Source(path, kind, content, named=Source(file, DEEPSPEED, _mapping(file)))
    unread = f"{section!r:.100}, which {path.name} names, is not here (nor in its folder and two above)"
    return Source(path, kind, content, unread=f"{unread}: what it sets is not compared")


def _mapping(path: Path) -> dict[str, Any]:
    """Return the content of a yaml or json file. JSON is tried first, because yaml reads `1e5` as a text."""
    try:
        text = files.read(path, MAX_BYTES)
        try:
            content = files.from_json(text)
        except ValueError:
            content = files.from_yaml(text)
    except (OSError, ValueError) as error:
        what = f"{str(path)!r:.300} cannot be read as yaml or json ({files.why(error)})"
        raise Stop(what, "correct the file, or name another one") from None
    if not isinstance(content, dict):
        raise Stop(f"{path} holds no named settings", "name a yaml or json file with a mapping")
    return {str(name): value for name, value in content.items()}


def _near(section: str, path: Path) -> Path | None:
    """Return the file that a config names, in the current folder, its own, or one of the two above.

    Other files are not read: a stranger's config may name any file of this machine, and its content would be shown.
    """
    for folder in (Path.cwd(), *path.resolve().parents[:3]):
        with contextlib.suppress(OSError, ValueError):  # not a valid file name
            file = (folder / section).resolve()
            if file.is_relative_to(folder.resolve()) and file.is_file():
                return file
    return None


def flat(content: dict, prefix: str = "") -> dict[str, Any]:
    """Return every value by its dotted path. The depth was limited when the file was read."""
    values: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, dict) and value:
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


AUTO = "auto"
ENGINES = {"NO": "one process", "MULTI_GPU": "DDP", "MULTI_CPU": "DDP", "DEEPSPEED": "DeepSpeed", "FSDP": "FSDP"}


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


def _at_paths(kind: str, content: dict, defaults: dict[str, Any] | None = None) -> EffectiveSettings:
    """Return the settings that a file of this kind has, and the defaults, by dotted path, of those that it lacks."""
    defaults = defaults or {}
    settings = {}
    for name, description in descriptions().items():
        path = getattr(description, kind)
        written = value_at(content, path) if path else AUTO
        if written in (None, "None"):
            settings[name] = Setting(defaults.get(path), is_default=True)
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
    known = library_defaults("deepspeed").items()
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
    if AUTO in [value_at(config, f"{name}.enabled") for name in AUTOCAST]:
        return None
    return "fp32"


def _mixed(half: str, settings: EffectiveSettings) -> EffectiveSettings:
    """Return what `mixed_precision` or the Trainer's flag makes of the precision. A DeepSpeed config's own counts."""
    dtype = AUTOCAST.get(half, half)
    if "stage" not in settings:
        how = {"no": "fp32"}.get(half, f"autocast to {dtype}")
    elif half != "no" and settings["precision"].value in (None, "fp32"):
        how = f"cast to {dtype}"
    else:
        return {}
    return {"precision": Setting(how)}


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
    settings = _at_paths("trainer", arguments, library_defaults("trainer")[""] if is_trainer else None)
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


# `accelerate launch` also sets its own defaults. ACCELERATE_CONFIG_DS_FIELDS names the keys that the yaml has.
FIELDS = {"clipping": "gradient_clipping", "accumulation": "gradient_accumulation_steps"}


def intended_settings(engine_config: dict | None, arguments=None) -> Promised:
    """Return what was asked for, by the most explicit source: a Trainer, the script's own config, or the launcher.

    `arguments` are transformers.TrainingArguments. `engine_config` is what a script without Accelerate gave DeepSpeed.
    """
    if engine_config is not None:
        wanted = {"source": "the script's DeepSpeed config", "deepspeed": True} | _asked_of_deepspeed(engine_config)
    else:
        wanted = _asked_of_launcher()
    if arguments is not None:
        wanted |= _asked_of_trainer(arguments, wanted)
    wanted["ranks"] = _number_in(os.environ.get("WORLD_SIZE"))
    return Promised.model_validate(wanted)


def _asked_of_launcher() -> dict[str, Any]:
    """Return what the environment of `accelerate launch` asks for; nothing without it."""
    seen = {name.removeprefix("ACCELERATE_"): value for name, value in os.environ.items()}
    if "MIXED_PRECISION" not in seen:
        return {}
    file = machine.launcher_config()
    wanted: dict[str, Any] = {
        "source": file.name if file else "Accelerate's environment",
        "deepspeed": seen.get("USE_DEEPSPEED") == "true",
        "fsdp": seen.get("USE_FSDP") == "true",
        "precision": seen["MIXED_PRECISION"],
    }
    if not wanted["deepspeed"]:
        return wanted
    if path := seen.get("DEEPSPEED_CONFIG_FILE"):  # Accelerate's precision is then the file's
        return wanted | {"source": Path(path).name} | _asked_of_deepspeed(_content(path))
    written = seen.get("CONFIG_DS_FIELDS", "").split(",")
    wanted |= {ours: _number_in(seen.get(key.upper())) for ours, key in FIELDS.items() if key in written}
    wanted |= {part: seen.get(f"DEEPSPEED_{part.upper()}_DEVICE") for part in OFFLOADS}
    return wanted | {"stage": _number_in(seen.get("DEEPSPEED_ZERO_STAGE"))}


def _asked_of_trainer(arguments, launched: dict[str, Any]) -> dict[str, Any]:
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
        config = {"deepspeed": True} | _asked_of_deepspeed(_content(arguments.deepspeed))
    elif launched.get("deepspeed"):  # the Trainer then takes the launcher's config
        config = launched | {"precision": None}
    return wanted | {name: value for name, value in config.items() if value is not None}


def _asked_of_deepspeed(config: dict) -> dict[str, Any]:
    """Return what a DeepSpeed config asks for. "auto" asks for nothing."""
    zero = zero_section(config)
    wanted: dict[str, Any] = {ours: _number_in(config.get(key)) for ours, key in FIELDS.items()}
    wanted |= {part: (zero.get(part) or {}).get("device", "none") for part in OFFLOADS}
    precision = next((name for name in AUTOCAST if (config.get(name) or {}).get("enabled") is True), None)
    return wanted | {"stage": _number_in(zero.get("stage", 0)), "precision": precision}


def _content(config: dict | str | Path) -> dict:
    if isinstance(config, dict):
        return config
    with contextlib.suppress(Stop):
        return read(Path(config)).content
    return {}


def _number_in(value) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):  # "auto", "none", or nothing
        return None
