"""The settings that count in a config or a record, by our names: as written, or the library's default."""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import with_config

from study.configs.sources import ACCELERATE, DEEPSPEED, OTHER, RECORD, TORCHTITAN, TRAINER, Source
from study.core.files import flat, from_toml, section_at, value_at
from study.core.fsdp_keys import POLICY
from study.core.ignored_keys import OFFLOADS
from study.core.library_defaults import library_defaults
from study.core.recipes import AUTOCAST
from study.core.shapes import model_of_name
from study.core.tables import NO_OTHER_KEYS, read_table
from study.core.text import comparable
from study.records.schema import Record

SETTINGS = Path(__file__).with_name("settings.toml")
PROGRAMS = Path(__file__).with_name("programs.toml")
AUTO = "auto"
COUNT = re.compile(r"0*[1-9][0-9]*(\.0)?")
UNKNOWN = "unknown"
HALVES = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}  # the second is DeepSpeed's older name, and still read
# As DeepSpeed's typed sections read truth values: by pydantic.
ON = ("true", "1", "1.0", "on", "t", "y", "yes")
OFF = ("none", "false", "0", "0.0", "off", "f", "n", "no")
OF_FSDP = "the Trainer's FSDP recomputing"
ASKED = ("stage", *OFFLOADS, "clipping", "accumulation")  # of DeepSpeed
# The fields of Description, and the libraries of the first three.
FIELDS = {
    ACCELERATE: "accelerate",
    DEEPSPEED: "deepspeed",
    TRAINER: "trainer",
    OTHER: "trainer",
    TORCHTITAN: "trainer",
    RECORD: "record",
}
ENGINES = {"NO": "one process", "MULTI_GPU": "DDP", "MULTI_CPU": "DDP", "DEEPSPEED": "DeepSpeed", "FSDP": "FSDP"}


@dataclass(frozen=True)
@with_config(NO_OTHER_KEYS)
class Description:
    """A setting by our name. The fields of the kinds of files are dotted paths."""

    id: str = ""  # that `study explain` takes; empty: not known to change losses or memory
    changes: str | None = None
    sentence: str = ""  # why it does
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
    return read_table(SETTINGS, dict[str, Description], Description)


@functools.cache
def programs() -> dict[str, dict[str, Any]]:
    """Return what programs do where their files say nothing, by the key that shows the program."""
    return from_toml(PROGRAMS.read_bytes())


def done_by_program(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the program of a file does where the file says nothing, by the Trainer's names."""
    does: dict[str, Any] = {}
    for key, of_program in programs().items():
        if content.get(key):
            does |= of_program
    return does


@dataclass(frozen=True)
class Setting:
    value: Any
    is_default: bool = False  # of the library: the file does not have the key
    is_open: bool = False  # something else than the file decides, or it is not understood
    older: str = ""  # the default of older releases, if it was another


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal: 1e-5, 0.00001 and "1e-5" are, as YAML reads it. 1 and true are not."""
    return comparable(a) == comparable(b)


UNSET = Setting(None)
FP32 = Setting("fp32", is_open=True)  # no config switches another on: a script may, or the Trainer's own flag
UNREAD = Setting(UNKNOWN, is_open=True)
OF_DEEPSPEED = dict.fromkeys((*ASKED, "optimizer"), UNREAD)  # what a config that was not read may set
OPEN = Setting(AUTO, is_open=True)
LAUNCHED = Setting("as launched", is_open=True)  # `accelerate launch` may say it
EffectiveSettings = dict[str, Setting]
# torchtitan's AdamW in the Trainer's words, and how many ranks divide the weights, or have copies.
OF_ADAMW = {"fused": "adamw_torch_fused", "foreach": "adamw_torch", "for-loop": "adamw_hf"}
OF_DATA = {"shard": -1, "replicate": 1}


def effective_settings(source: Source) -> EffectiveSettings:
    """Return the settings that count, by our names: as written, or the library's default."""
    if source.record is not None:
        return _of_record(source.record, source.content)
    if source.kind == DEEPSPEED:
        return _of_deepspeed(source.content)
    if source.kind == ACCELERATE:
        return _of_accelerate(source)
    if source.kind == TORCHTITAN:
        return _of_torchtitan(source.content)
    return _of_trainer(source)  # files of other programs often use the Trainer's names


def at_paths(kind: str, content: dict, defaults: dict[str, Any]) -> EffectiveSettings:
    """Return the settings that a file of this kind has, and the defaults, by dotted path, of those that it lacks."""
    of_program = done_by_program(content)
    settings = {}
    for name, description in descriptions().items():
        path = getattr(description, kind)
        if path is None:
            continue
        setting = _written(description, content, path)
        if setting.value in (None, "None"):
            older = description.older if kind == "deepspeed" else ""
            is_open = kind == "trainer" and path not in of_program  # flags may replace the Trainer's defaults
            setting = Setting((defaults | of_program).get(path), is_default=True, is_open=is_open, older=older)
        if setting.value is not None:
            settings[name] = setting
    return settings


def _written(description: Description, content: dict, path: str) -> Setting:
    """Return what a file writes. YAML and Accelerate write nothing as null or as the word None."""
    value = value_at(content, path)
    for key in description.keys:  # as other programs call it
        value = content.get(key, value)
    value = description.words.get(str(value), value)
    no_count = description.is_count and not COUNT.fullmatch(str(value))
    return Setting(value, is_open=value == AUTO or no_count)


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
    # --- what is written, and the defaults of DeepSpeed as core/library_defaults.json keeps them
    zero = zero_section(config)
    known = library_defaults("deepspeed")
    defaults = flat(known[""] | known)
    # The validator of DeepSpeedZeroConfig sets it by the stage, if the config leaves it open.
    defaults["zero_optimization.overlap_comm"] = zero.get("stage") == 3
    settings = at_paths("deepspeed", config | {"zero_optimization": zero}, defaults)
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


def half_precision(config: dict, path: str = "{}") -> str | None:
    """Return the precision of 16 bits that a config switches on. AUTO if it is open, or not understood."""
    for key, name in HALVES.items():
        word = str(value_at(config, path.format(key))).lower()
        if word not in OFF:
            return name if word in ON else AUTO
    return None


def _cast_of(config: dict) -> Setting:
    """Return the precision of a DeepSpeed config."""
    # DeepSpeed casts the weights to its own sections' types. `torch_autocast` keeps them in fp32.
    half = half_precision(config, "{}.enabled")
    if half in AUTOCAST:
        return Setting(f"cast to {AUTOCAST[half]}")
    if value_at(config, "torch_autocast.enabled"):
        dtype = str(value_at(config, "torch_autocast.dtype") or "PyTorch's default").removeprefix("torch.")
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
    versions = (settings.get(name, UNSET).value for name in ("fsdp_version", "the Trainer's fsdp_version"))
    if engine.value == "FSDP" and "2" in map(str, versions):  # and no autocast (_prepare_fsdp2 of Accelerate 1.15.0)
        how = "cast in passes"
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
            f"fsdp_config.{POLICY}": "NO_WRAP",
        }
    settings = at_paths("accelerate", config, default)
    # Each version of FSDP reads one of the last two (utils/dataclasses.py:1845).
    unread = "FSDP1's sharding" if str(value_at(config, "fsdp_config.fsdp_version")) == "2" else "sharding"
    settings.pop(unread, None)
    recomputing = settings.get("checkpointing", UNSET)
    if str(recomputing.value).lower() in OFF and recomputing.value is not None:  # FSDP's own: a script may do it
        settings["checkpointing"] = replace(recomputing, is_open=True)
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
    half = half_precision(content)
    defaults = library_defaults("trainer")[""]
    if {"base_model", "train_type", "tuner_type"} & content.keys():  # axolotl's, and ms-swift's
        defaults = {}
        if half is content.get("bf16"):  # None: ms-swift takes torch_dtype's (model_args.py:130), axolotl the GPU's
            half = HALVES.get(str(content.get("torch_dtype")), AUTO)
    if source.kind != TRAINER:
        return _mixed(half, at_paths("trainer", content, {}))
    settings = {"precision": FP32} | at_paths("trainer", content, defaults)
    if str(settings.get(OF_FSDP, UNSET).value).lower() in OFF:  # the Trainer's own key may recompute all the same
        settings.pop(OF_FSDP, None)
    if source.named:
        engine = _of_deepspeed(source.named.content)  # its own settings count, but for those that it leaves open
        settings = engine | settings | {name: each for name, each in engine.items() if each.value != AUTO}
    elif source.unread is not None:
        settings = _with_unread_engine(settings, content["deepspeed"])
    else:
        is_fsdp = content.get("fsdp") or "axolotl's fsdp_version" in settings
        settings["engine"] = Setting("FSDP") if is_fsdp else LAUNCHED
    return _mixed(half, settings)


def _with_unread_engine(settings: EffectiveSettings, name: str) -> EffectiveSettings:
    """Return the Trainer's settings beside a DeepSpeed config that was not read."""
    # The Trainer stops where its numbers are not that file's, but clips as that file's default says.
    settings = OF_DEEPSPEED | settings | {"engine": Setting("DeepSpeed"), "clipping": UNREAD}
    if preset := re.fullmatch("zero([0-3])(?:_offload)?", name):  # ms-swift's own files
        settings["stage"] = Setting(int(preset[1]))
    return settings


def _of_torchtitan(content: dict) -> EffectiveSettings:
    """Return the settings of a torchtitan config (job_config.py): its sections and keys, and those of older releases.

    What divides layers or tokens among ranks is not predicted: such a training has no engine here.
    """
    written: dict[str, Any] = {}
    for section in ("experimental", "training", "parallelism"):  # where the degrees were, and are
        written |= section_at(content, section)

    def setting(default: Any, *names: str) -> Setting:
        value = next((written[name] for name in names if name in written), None)
        return Setting(default, is_default=True) if value is None else Setting(value)

    model = section_at(content, "model")
    names = [f"{model.get('name')}-{model.get('flavor')}", *map(model.get, ("hf_assets_path", "tokenizer_path"))]
    settings = {
        "model": Setting(next(filter(model_of_name, map(str, names)), names[0])),
        "sequences per micro-batch and rank": setting(8, "local_batch_size", "batch_size"),
        "sequence": setting(2048, "seq_len"),
    }
    recomputes = {"full": True, "none": False}.get(
        section_at(content, "activation_checkpoint").get("mode", "selective")
    )
    settings["selective recomputing" if recomputes is None else "checkpointing"] = Setting(recomputes is not False)
    optimizer = section_at(content, "optimizer")
    if optimizer.get("name", "AdamW") == "AdamW":
        settings["the Trainer's optim"] = Setting(OF_ADAMW[optimizer.get("implementation", "fused")])
    dtype = setting("float32", "dtype").value
    param = setting("bfloat16", "mixed_precision_param").value
    settings["precision"] = Setting("fp32" if "32" in param else f"cast in passes to {param}")
    if dtype != "float32":
        settings["loaded"] = settings.pop("precision")
    shards, copies = (setting(default, f"data_parallel_{name}_degree").value for name, default in OF_DATA.items())
    if any(setting(1, f"{name}_parallel_degree").value > 1 for name in ("tensor", "pipeline", "context", "expert")):
        return settings | {"layers or tokens divided": Setting(True)}
    if shards > 0:
        settings["ranks"] = Setting(shards * copies)
    if shards == 1:
        return settings | {"engine": Setting("DDP")}
    reshards = setting("default", "fsdp_reshard_after_forward").value != "never"
    return settings | {
        "engine": Setting("FSDP"),
        "fsdp_version": Setting(2),
        "plain": Setting(True),
        "sharding": Setting(reshards),
        "groups of ranks": Setting(copies),
        "FSDP's offloading": setting(False, "enable_cpu_offload"),
    }


def _of_record(record: Record, content: dict) -> EffectiveSettings:
    seen = record.observed
    settings = {f"version of {name}": Setting(version) for name, version in record.software.items()}
    if seen.deepspeed:  # as the engine resolved it
        settings |= _of_deepspeed(seen.deepspeed)
    # The values that were read back from the prepared objects take precedence over the config.
    settings |= at_paths("record", content, {})
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
