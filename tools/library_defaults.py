"""Writes `study/core/library_defaults.json`: keys, types and defaults of the installed libraries' configs.

python tools/library_defaults.py
"""

import argparse
import dataclasses
import enum
import json
import tomllib
from importlib import metadata
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_args

import accelerate
import pydantic
import transformers
from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
from accelerate.commands.launch import launch_command_parser

from study.core.library_defaults import DEFAULTS_FILE

TYPES = Path(__file__).with_name("library_types.toml")
STRICT = {  # sections in which DeepSpeed refuses unknown keys. To import it takes seconds
    "zero_optimization": "deepspeed.runtime.zero.config:DeepSpeedZeroConfig",
    "bf16": "deepspeed.runtime.precision_config:DeepSpeedBF16Config",
    "bfloat16": "deepspeed.runtime.precision_config:DeepSpeedBF16Config",
    "fp16": "deepspeed.runtime.precision_config:DeepSpeedFP16Config",
    "tensor_parallel": "deepspeed.runtime.tensor_parallel.config:TPTrainingConfig",
    "hybrid_engine": "deepspeed.runtime.config:HybridEngineConfig",
    "compile": "deepspeed.compile.config:CompileConfig",
    "comms_logger": "deepspeed.comm.config:CommsLoggerConfig",
    "tensorboard": "deepspeed.monitor.config:TensorBoardConfig",
    "wandb": "deepspeed.monitor.config:WandbConfig",
    "csv_monitor": "deepspeed.monitor.config:CSVConfig",
    "comet": "deepspeed.monitor.config:CometConfig",
    "timers.throughput": "deepspeed.utils.config:DeepSpeedThroughputTimerConfig",
}
# Sections that DeepSpeed reads key by key, so that it ignores unknown ones. It reads more of two if they name a type.
READ_BY_KEY = {
    **dict.fromkeys(
        ("activation_checkpointing", "aio", "checkpoint", "data_types", "flops_profiler", "torch_autocast")
    ),
    "optimizer": "AdamW",
    "scheduler": "WarmupLR",
}
GROUPS = {  # sections of Accelerate's yaml, and the launcher's options that they set
    "deepspeed_config": "DeepSpeed Arguments",
    "fsdp_config": "FSDP Arguments",
    "parallelism_config": "ParallelismConfig Arguments",
}


class Recorder(dict):
    """A config that records the keys that it is asked for, and the defaults that are given with them."""

    def __init__(self, *content: dict) -> None:
        super().__init__(*content)
        self.asked: dict[str, Any] = {}

    def get(self, key: str, default: Any = None) -> Any:
        self.asked[key] = default
        return super().get(key, default)

    def __contains__(self, key: Any) -> bool:
        self.asked.setdefault(key, None)
        return super().__contains__(key)

    def keys(self) -> "Recorder":  # type: ignore[override]
        return self

    def __copy__(self) -> "Recorder":
        return self


def plain(value: Any) -> Any:
    """Return a default as JSON can write it; None for an object."""
    if isinstance(value, enum.Enum):
        return value.value
    return value if isinstance(value, str | int | float | list) else None


def of_model(path: str, model: type[pydantic.BaseModel], types: dict) -> dict:
    """Return the sections of a config class, and of the classes of its fields. Add the types of their keys."""
    schema = model.__pydantic_core_schema__
    while "fields" not in schema:
        schema = schema["schema"]
    defaults: dict[str, Any] = {}
    here: dict[str, dict] = {}
    found = {path: defaults}
    for name, field in model.model_fields.items():
        key = field.alias or name  # DeepSpeed takes both
        defaults[key] = plain(field.default)
        here |= dict.fromkeys((name, key), plain_type(schema["fields"][name]["schema"]))
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
                found |= of_model(f"{path}.{key}", kind, types)
    types[path] = here | types.get(path, {})
    return found


def plain_type(schema: dict) -> dict:
    """Return pydantic's schema of a field as JSON can hold it. What JSON cannot hold is any value."""
    kind = schema["type"]
    if kind == "nullable":
        return {"type": kind, "schema": plain_type(schema["schema"])}
    if kind == "enum":
        return {"type": "literal", "expected": [member.value for member in schema["members"]]}
    if kind == "model":
        return {"type": "dict"}
    if "schema" in schema:  # a validator, or a default
        return plain_type(schema["schema"])
    return schema if kind in ("bool", "int", "float", "str", "literal") else {"type": "any"}


def of_deepspeed(types: dict) -> dict:
    by_key = {name: Recorder({"type": kind} if kind else {}) for name, kind in READ_BY_KEY.items()}
    recorder = Recorder({"train_batch_size": 1} | by_key)
    resolve_name("deepspeed.runtime.config:DeepSpeedConfig")(recorder)
    read = {"": recorder} | by_key
    found = {path: {name: plain(value) for name, value in sorted(each.asked.items())} for path, each in read.items()}
    for path, name in STRICT.items():
        found |= of_model(path, resolve_name(name), types)
    return found


def of_accelerate() -> dict:
    classes = (SageMakerConfig, ClusterConfig)
    fields = {field.name: plain(field.default) for each in classes for field in dataclasses.fields(each)}
    groups = {group.title: group._group_actions for group in launch_command_parser()._action_groups}
    options = {path: {each.dest: plain(each.default) for each in groups[title]} for path, title in GROUPS.items()}
    return {"": fields | {"fp16": None, "dynamo_backend": None}} | options  # the last two are old forms


def of_trainer() -> dict:
    return {"": {field.name: plain(field.default) for field in dataclasses.fields(transformers.TrainingArguments)}}


def exported() -> dict:
    """Return what is known of each library: its version, its sections, and the types of their keys."""
    written = tomllib.loads(TYPES.read_text())
    deepspeed = of_deepspeed(written["deepspeed"]["types"])
    closed = [path for path in deepspeed if path and path not in READ_BY_KEY]
    found: dict[str, dict] = {
        "deepspeed": {"version": metadata.version("deepspeed"), "sections": deepspeed, "closed": closed},
        "accelerate": {"version": accelerate.__version__, "sections": of_accelerate()},
        "trainer": {"version": transformers.__version__, "sections": of_trainer()},
    }
    for name, each in found.items():
        each |= written[name]
        for path, types in each["types"].items():
            each["sections"][path] = dict.fromkeys(types) | each["sections"].get(path, {})
    return found


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    DEFAULTS_FILE.write_text(json.dumps(exported(), indent=1) + "\n")
