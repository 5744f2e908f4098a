"""Read anybody's config or record without trusting it, and recognise its kind by its keys."""

import contextlib
import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from study.core import files, machine
from study.core.arms import DEEPSPEED_NUMBERS, OFFLOADS, config_of_yaml, library_defaults
from study.core.errors import Stop
from study.core.recipes import AUTOCAST
from study.known.findings import texts
from study.records import store
from study.records.metrics import dig
from study.records.schema import Record
from study.records.sections import Promised

SETTINGS = Path(__file__).with_name("settings.toml")
PROGRAMS = Path(__file__).with_name("programs.toml")
MAX_BYTES = 2**16  # of a config: DeepSpeed's longest examples have 4 kB
RECORD = "record"
ACCELERATE = "Accelerate config"
DEEPSPEED = "DeepSpeed config"
TRAINER = "Trainer arguments"
OTHER = "settings"
NAMES_ANOTHER = {TRAINER: "deepspeed", ACCELERATE: "deepspeed_config.deepspeed_config_file"}  # where it names one
# A file has the kind with the most of its keys.
KEYS = {
    OTHER: "",
    ACCELERATE: "distributed_type compute_environment mixed_precision deepspeed_config num_processes "
    "num_machines machine_rank main_training_function downcast_bf16 rdzv_backend use_cpu same_network",
    DEEPSPEED: "zero_optimization train_batch_size train_micro_batch_size_per_gpu zero_allow_untested_optimizer "
    "optimizer scheduler gradient_clipping steps_per_print wall_clock_breakdown torch_autocast amp",
    TRAINER: "per_device_train_batch_size output_dir learning_rate num_train_epochs max_steps max_grad_norm deepspeed "
    "fsdp lr_scheduler_type warmup_steps warmup_ratio gradient_checkpointing logging_steps save_steps weight_decay "
    "optim base_model micro_batch_size adapter sequence_len lr_scheduler finetuning_type cutoff_len tuner_type "
    "train_type",
}  # fsdp_config is of two kinds, and bf16 as well


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


def read(path: Path) -> Source:
    """Read any config or record. A Stop says what is wrong with the file."""
    if path.is_dir():
        path /= store.RECORD
    if path.name == store.RECORD:
        record = store.read(path)
        return Source(path, RECORD, record.model_dump(mode="json", by_alias=True), record)
    content = _mapping(path)
    kind = max(KEYS, key=lambda kind: len(content.keys() & KEYS[kind].split()))
    fsdp_file = content.get("fsdp_config")  # of the Trainer it may be a file
    if isinstance(fsdp_file, str) and (file := _allowed(fsdp_file, path)):
        content["fsdp_config"] = _mapping(file)
    if "offload" in str(content.get("fsdp")):  # of the Trainer
        content["fsdp_config"] = section_at(content, "fsdp_config") | {"fsdp_offload_params": True}
    # Accelerate and the Trainer know these with and without their prefix (launch.py:1269, training_args.py:2785).
    if fsdp := section_at(content, "fsdp_config"):
        content["fsdp_config"] = {f"fsdp_{name.removeprefix('fsdp_')}": value for name, value in fsdp.items()}
    # --- the DeepSpeed config in it, or the file that it names
    section = dig(content, NAMES_ANOTHER.get(kind, "no other"))
    if section is None and content.get("distributed_type") == "DEEPSPEED":
        section = config_of_yaml(section_at(content, "deepspeed_config"))
    named = None
    unread = None
    if isinstance(section, dict):
        named = Source(path, DEEPSPEED, section)
        content.pop("deepspeed", None)
    elif isinstance(section, str):
        if file := _allowed(section, path):
            named = Source(file, DEEPSPEED, _mapping(file))
        else:
            unread = f"{section!r:.100}, which {path.name} names, is not here (nor in its folder and two above)"
            unread += ": what it sets is not known"
    return Source(path, kind, content, named=named, unread=unread)


def _allowed(name: str, config: Path) -> Path | None:
    """Return the file that a config names, if it is in the current folder, its own, or one of the two above that."""
    # A stranger's config may name any file of this machine, and its content would be shown.
    for folder in (Path.cwd(), *config.resolve().parents[:3]):
        with contextlib.suppress(OSError, ValueError):  # not a valid file name
            file = (folder / name).resolve()
            if file.is_relative_to(folder.resolve()) and file.is_file():
                return file
    return None


def _mapping(path: Path) -> dict[str, Any]:
    what = "a mapping of settings"
    remedy = (
        f"name {what} with each key once, in yaml, or in json without comments and without a comma after the last value"
    )
    return _plain(files.load(path, dict, what=what, remedy=remedy, most_bytes=MAX_BYTES, links=True))


def _plain(value: Any) -> Any:
    """Return settings with true and false also where they are in quotes, as the libraries read them."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    word = str(value).lower()
    return word == "true" if word in ("true", "false") else value


def flat(content: dict, prefix: str = "") -> dict[str, Any]:
    """Return every value by its dotted path. Lists without sections, and empty sections, are values."""
    values: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, list) and any(isinstance(each, dict) for each in value):
            value = dict(enumerate(value))
        if isinstance(value, dict) and value:
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


AUTO = "auto"
UNKNOWN = "unknown"
HALVES = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}  # the second is DeepSpeed's older name, and still read
ASKED = ("stage", *OFFLOADS, "clipping", "accumulation")  # of DeepSpeed
ENGINES = {"NO": "one process", "MULTI_GPU": "DDP", "MULTI_CPU": "DDP", "DEEPSPEED": "DeepSpeed", "FSDP": "FSDP"}


@dataclass(frozen=True)
class Description:
    """A setting by our name. The fields of the kinds of files are dotted paths."""

    changes: str | None = None  # None: not known to change losses or memory
    why: str = ""
    unless: str | int | bool | None = None  # another value counts even if only one file has the setting
    is_count: bool = False  # a value that is none is not understood
    older: str = ""  # DeepSpeed's default in older releases, if it was another
    deepspeed: str | None = None
    accelerate: str | None = None
    trainer: str | None = None
    record: str | None = None
    keys: Sequence[str] = ()
    words: Mapping[str, Any] = field(default_factory=dict)  # for values that may be written otherwise


@functools.cache
def descriptions() -> dict[str, Description]:
    """Return all descriptions by name. The settings that matter most come first."""
    return {name: Description(**fields) for name, fields in texts(SETTINGS).items()}


@dataclass(frozen=True)
class Setting:
    value: Any
    is_default: bool = False  # of the library: the file does not have the key
    is_open: bool = False  # something else than the file decides, or it is not understood
    older: str = ""  # the default of older releases, if it was another


UNSET = Setting(None)
FP32 = Setting("fp32", is_open=True)  # no config switches another on: a script may, or the Trainer's own flag
UNREAD = Setting(UNKNOWN, is_open=True)
OF_DEEPSPEED = dict.fromkeys((*ASKED, "optimizer"), UNREAD)  # what a config that was not read may set
OPEN = Setting(AUTO, is_open=True)
LAUNCHED = Setting("as launched", is_open=True)  # `accelerate launch` may say it
EffectiveSettings = dict[str, Setting]


def section_at(content: Any, path: str) -> dict:
    """Return the section at a dotted path. Empty if there is none, or another value."""
    section = dig(content, path)
    return section if isinstance(section, dict) else {}


def effective_settings(source: Source) -> EffectiveSettings:
    """Return the settings that count, by our names: as written, or the library's default."""
    if source.record is not None:
        return _of_record(source.record, source.content)
    if source.kind == DEEPSPEED:
        return _of_deepspeed(source.content)
    if source.kind == ACCELERATE:
        return _of_accelerate(source)
    return _of_trainer(source)  # files of other programs often use the Trainer's names


def _at_paths(kind: str, content: dict, defaults: dict[str, Any]) -> EffectiveSettings:
    """Return the settings that a file of this kind has, and the defaults, by dotted path, of those that it lacks."""
    settings = {}
    of_program: dict[str, Any] = {}
    for key, does in texts(PROGRAMS).items():
        if content.get(key):
            of_program |= does
    for name, description in descriptions().items():
        path = getattr(description, kind)
        if path is None:
            continue
        value = dig(content, path)
        for key in description.keys:  # as other programs call it
            value = content.get(key, value)
        # YAML and Accelerate write nothing as null or as the word None. Flags may replace the Trainer's defaults.
        value = description.words.get(str(value), value)
        no_count = description.is_count and not str(value).removesuffix(".0").isdecimal()  # 4.0 is one
        setting = Setting(value, is_open=value == AUTO or no_count)
        if value in (None, "None"):
            older = description.older if kind == "deepspeed" else ""
            value = of_program.get(path, defaults.get(path))
            is_open = kind == "trainer" and path not in of_program
            setting = Setting(value, is_default=True, is_open=is_open, older=older)
        if setting.value is not None:
            settings[name] = setting
    return settings


def zero_section(config: dict) -> dict:
    """Return the section `zero_optimization`, with what DeepSpeed makes of its older form, cpu_offload."""
    zero = section_at(config, "zero_optimization")
    if config.get("zero_optimization") is True:  # older still (zero/config.py:60)
        zero = {"stage": 1}
    for stage in range(4):  # DeepSpeed also takes "3" and 3.0 for 3, and true for 1
        if zero.get("stage") in (stage, str(stage)):
            zero = zero | {"stage": stage}
    # DeepSpeed marks the key as deprecated, and still translates it like this (zero/config.py:209).
    if zero.get("cpu_offload") is True:
        return zero | {"offload_optimizer": {"device": "cpu"}}
    return zero


def _of_deepspeed(config: dict) -> EffectiveSettings:
    # --- what is written, and the defaults of DeepSpeed as core/arms.py keeps them
    zero = zero_section(config)
    known = library_defaults("deepspeed")
    defaults = flat(known[""] | known)
    # The validator of DeepSpeedZeroConfig sets it by the stage, if the config leaves it open.
    defaults["zero_optimization.overlap_comm"] = zero.get("stage") == 3
    settings = _at_paths("deepspeed", config | {"zero_optimization": zero}, defaults)
    if zero.get("stage") != 3:
        # Keys of stage 3 are not read by the others.
        of_three = ("stage3_", "offload_param")
        settings = {name: setting for name, setting in settings.items() if not name.startswith(of_three)}
        # Stages 1 and 2 take nvme for cpu: they only ask whether the device is "none" (stage_1_and_2.py:220).
        if settings["offload_optimizer"].value == "nvme":
            settings |= {"offload_optimizer": Setting("cpu"), "offload as written": Setting("nvme")}
    settings["engine"] = Setting("DeepSpeed")
    settings["precision"] = _cast_of(config)
    return settings


def _half(config: dict, path: str = "{}") -> str | None:
    """Return the precision of 16 bits that a config switches on. AUTO if it is open, or not understood."""
    for key, name in HALVES.items():
        value = dig(config, path.format(key))
        if value not in (None, False):
            return name if value is True else AUTO
    return None


def _cast_of(config: dict) -> Setting:
    """Return the precision of a DeepSpeed config."""
    # DeepSpeed casts the weights to its own sections' types. `torch_autocast` keeps them in fp32.
    half = _half(config, "{}.enabled")
    if half in AUTOCAST:
        return Setting(f"cast to {AUTOCAST[half]}")
    if dig(config, "torch_autocast.enabled"):
        dtype = str(dig(config, "torch_autocast.dtype") or "PyTorch's default").removeprefix("torch.")
        dtype = AUTOCAST.get(dtype, dtype)
        return Setting(f"autocast to {dtype}", is_open=dtype not in AUTOCAST.values())
    return OPEN if half else FP32


def _mixed(half: str | None, settings: EffectiveSettings) -> EffectiveSettings:
    """Return settings with what `mixed_precision`, or a flag of the Trainer, makes of a precision that is open."""
    if half in (None, "no", "none") or settings.get("precision", UNSET).value not in (None, "fp32", AUTO):
        return settings
    # Under DeepSpeed, Accelerate switches its own autocast off (state.py:957), and the engine casts the weights.
    engine = settings.get("engine", LAUNCHED)
    how = "cast or autocast" if engine.is_open else "autocast"
    if engine.value == "DeepSpeed":
        how = "cast"
    precision = Setting(f"{how} to {AUTOCAST.get(half, half)}", is_open=engine.is_open)
    return settings | {"precision": OPEN if half == AUTO else precision}


def _of_accelerate(source: Source) -> EffectiveSettings:
    config = source.content
    kind = str(config.get("distributed_type") or "NO")  # yaml reads an unquoted NO as false
    default = {}
    if kind != "FSDP":  # its section is not read
        config = config | {"fsdp_config": None}
    else:  # utils/dataclasses.py:1831, and commands/launch.py:586, which says it whatever the plugin's default
        default = {
            "fsdp_config.fsdp_version": 1,
            "fsdp_config.fsdp_cpu_ram_efficient_loading": True,
            "fsdp_config.fsdp_sharding_strategy": "FULL_SHARD",
            "fsdp_config.fsdp_reshard_after_forward": True,
        }
    settings = _at_paths("accelerate", config, default)
    # Each version of FSDP reads one of the last two (utils/dataclasses.py:1845).
    unread = "FSDP1's sharding" if str(dig(config, "fsdp_config.fsdp_version")) == "2" else "sharding"
    settings.pop(unread, None)
    settings["engine"] = Setting(ENGINES.get(kind, kind)) if "distributed_type" in config else LAUNCHED
    if source.unread is not None:
        return OF_DEEPSPEED | settings | {"precision": UNREAD}
    if source.named:
        # With a file of its own for DeepSpeed, a yaml may not repeat what that sets: a ValueError
        # (utils/dataclasses.py:1525).
        settings = _of_deepspeed(source.named.content) | settings
    # The launcher takes it in capitals as well.
    return _mixed(str(config.get("mixed_precision") or "no").lower(), {"precision": FP32} | settings)


def _of_trainer(source: Source) -> EffectiveSettings:
    content = source.content
    defaults = library_defaults("trainer")[""]
    half = _half(content)
    if {"base_model", "train_type", "tuner_type"} & content.keys():  # axolotl's, and ms-swift's
        defaults = {}
        if half is content.get("bf16"):  # None: ms-swift takes torch_dtype's (model_args.py:130), axolotl the GPU's
            half = HALVES.get(str(content.get("torch_dtype")), AUTO)
    if source.kind != TRAINER:
        return _mixed(half, _at_paths("trainer", content, {}))
    settings = {"precision": FP32} | _at_paths("trainer", content, defaults)
    if source.named:  # its numbers count, and the Trainer's where it leaves them open
        engine = _of_deepspeed(source.named.content)
        settings = engine | settings | {name: each for name, each in engine.items() if each.value != AUTO}
    elif source.unread is not None:
        # The Trainer stops where its numbers are not that file's, but clips as that file's default says.
        settings = OF_DEEPSPEED | settings | {"engine": Setting("DeepSpeed"), "clipping": UNREAD}
        if preset := re.fullmatch("zero([0-3])(?:_offload)?", content["deepspeed"]):  # ms-swift's own files
            settings["stage"] = Setting(int(preset[1]))
    else:
        is_fsdp = content.get("fsdp") or "axolotl's fsdp_version" in settings
        settings["engine"] = Setting("FSDP") if is_fsdp else LAUNCHED
    return _mixed(half, settings)


def _of_record(record: Record, content: dict) -> EffectiveSettings:
    seen = record.observed
    settings = {f"version of {name}": Setting(version) for name, version in record.software.items()}
    if seen.deepspeed:  # as the engine resolved it
        settings |= _of_deepspeed(seen.deepspeed)
    # The values that were read back from the prepared objects take precedence over the config.
    settings |= _at_paths("record", content, {})
    # A cast cannot be seen in `mixed_precision`, which Accelerate sets to "no" under DeepSpeed: the weights' dtype
    # shows it.
    weights = seen.dtypes.get("weights")
    if seen.autocast in AUTOCAST:
        settings["precision"] = Setting(f"autocast to {AUTOCAST[seen.autocast]}")
    elif weights is not None:
        settings["precision"] = Setting("fp32" if weights == "float32" else f"cast to {weights}")
    if seen.distributed_type:
        settings["engine"] = Setting(ENGINES.get(seen.distributed_type, "DDP"))
    return settings


# --- what the script of a watched run asks for


def intended_settings(engine_config: dict | None, arguments=None) -> Promised:
    """Return what was asked for, by the most explicit source: a Trainer, the script's own config, or the launcher.

    `arguments` are transformers.TrainingArguments. `engine_config` is what a script without Accelerate gave DeepSpeed.
    """
    # `accelerate launch` hands everything on as variables of the environment (accelerate/utils/launch.py:565).
    asked: dict[str, Any] = {}
    if engine_config is not None:
        asked = {"source": "the script's DeepSpeed config"} | _asked_of_deepspeed(engine_config)
    elif "ACCELERATE_MIXED_PRECISION" in os.environ:
        asked = _asked_of_launcher()
    # --- a Trainer: the numbers of a DeepSpeed config count, and those of its arguments where that is open
    if arguments is not None:
        config = {name: value for name, value in asked.items() if name != "precision"}  # which the Trainer replaces
        if arguments.deepspeed:
            config = _asked_of_deepspeed(_content(arguments.deepspeed))
        asked = {
            "source": "TrainingArguments",
            "clipping": float(arguments.max_grad_norm or 0),
            "precision": _half(vars(arguments)) or "no",
            "accumulation": arguments.gradient_accumulation_steps,
            "checkpointing": arguments.gradient_checkpointing,
        } | config
    return Promised.model_validate({"ranks": os.environ.get("WORLD_SIZE")} | asked)


def _asked_of_launcher() -> dict[str, Any]:
    """Return what the environment of `accelerate launch` asks for."""
    launched = {name.removeprefix("ACCELERATE_").lower(): value for name, value in os.environ.items()}
    file = machine.launcher_config()
    asked: dict[str, Any] = {
        "source": file.name if file else "Accelerate's environment",
        "deepspeed": launched.get("use_deepspeed") == "true",
        "fsdp": launched.get("use_fsdp") == "true",
        "precision": launched["mixed_precision"],
    }
    if not asked["deepspeed"]:
        return asked
    if path := launched.get("deepspeed_config_file"):  # Accelerate's precision is then the file's
        return asked | {"source": Path(path).name} | _asked_of_deepspeed(_content(path))
    # `accelerate launch` also sets its own defaults. ACCELERATE_CONFIG_DS_FIELDS names the keys that the yaml has.
    unwritten = {*DEEPSPEED_NUMBERS}.difference(launched.get("config_ds_fields", "").split(","))
    section = {name.removeprefix("deepspeed_"): value for name, value in launched.items() if value != "none"}
    return _asked_of_deepspeed(config_of_yaml(section | dict.fromkeys(unwritten))) | asked


def _asked_of_deepspeed(config: dict) -> dict[str, Any]:
    """Return what a DeepSpeed config asks for. "auto" asks for nothing."""
    zero = {"stage": 0} | {part: {"device": "none"} for part in OFFLOADS} | zero_section(config)
    written = _at_paths("deepspeed", config | {"zero_optimization": zero}, {})
    settings = {name: written[name].value for name in ASKED if name in written and written[name].value != AUTO}
    if (half := _half(config, "{}.enabled")) in AUTOCAST:
        settings["precision"] = half
    return {"deepspeed": True} | settings


def _content(config: dict | str | Path) -> dict:
    if isinstance(config, dict):
        return config
    with contextlib.suppress(Stop):
        return read(Path(config)).content
    return {}
