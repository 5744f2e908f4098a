"""`library_defaults.json` has the keys and defaults of the installed libraries. --refresh-golden exports it anew."""

import dataclasses
import enum
import json
from importlib import metadata
from pkgutil import resolve_name
from typing import get_args

import accelerate
import pydantic
import transformers
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser

from study.core import arms

STRICT = {  # sections in which DeepSpeed refuses unknown keys. To import it takes seconds, and not each worker needs it
    "zero_optimization": "deepspeed.runtime.zero.config:DeepSpeedZeroConfig",
    "bf16": "deepspeed.runtime.precision_config:DeepSpeedBF16Config",
    "fp16": "deepspeed.runtime.precision_config:DeepSpeedFP16Config",
    "tensor_parallel": "deepspeed.runtime.tensor_parallel.config:TPTrainingConfig",
    "hybrid_engine": "deepspeed.runtime.config:HybridEngineConfig",
    "compile": "deepspeed.compile.config:CompileConfig",
    "comms_logger": "deepspeed.comm.config:CommsLoggerConfig",
}
GROUPS = {  # sections of Accelerate's yaml, and the launcher's options that they set
    "deepspeed_config": "DeepSpeed Arguments",
    "fsdp_config": "FSDP Arguments",
    "parallelism_config": "ParallelismConfig Arguments",
}


class Recorder(dict):
    """A config that records the keys that it is asked for, and the defaults that are given with them."""

    def __init__(self, *content):
        super().__init__(*content)
        self.asked = {}

    def get(self, key, default=None):
        self.asked[key] = default
        return super().get(key, default)

    def __contains__(self, key):
        self.asked.setdefault(key, None)
        return super().__contains__(key)

    def keys(self):
        return self

    def __copy__(self):
        return self


def plain(value):
    """Return a default as JSON can write it; None for an object."""
    if isinstance(value, enum.Enum):
        return value.value
    return value if isinstance(value, str | int | float | list) else None


def of_model(path: str, model: type[pydantic.BaseModel]) -> dict:
    """Return the sections of a config class, and of the classes of its fields."""
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    found = {path: {name: plain(field.default) for name, field in fields.items()}}
    for name, field in fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
                found |= of_model(f"{path}.{name}", kind)
    return found


def of_deepspeed() -> dict:
    recorder = Recorder({"train_batch_size": 1})
    resolve_name("deepspeed.runtime.config:DeepSpeedConfig")(recorder)
    found = {"": {name: plain(value) for name, value in sorted(recorder.asked.items())}}
    for path, name in STRICT.items():
        found |= of_model(path, resolve_name(name))
    return found


def of_accelerate() -> dict:
    fields = {field.name: plain(field.default) for field in dataclasses.fields(ClusterConfig)}
    groups = {group.title: group._group_actions for group in launch_command_parser()._action_groups}
    options = {path: {each.dest: plain(each.default) for each in groups[title]} for path, title in GROUPS.items()}
    return {"": fields | {"fp16": None, "dynamo_backend": None}} | options  # the last two are old forms


def of_trainer() -> dict:
    return {"": {field.name: plain(field.default) for field in dataclasses.fields(transformers.TrainingArguments)}}


def test_the_file_has_the_defaults_of_the_installed_libraries(request):
    exported = {
        "deepspeed": {"version": metadata.version("deepspeed"), "sections": of_deepspeed()},
        "accelerate": {"version": accelerate.__version__, "sections": of_accelerate()},
        "trainer": {"version": transformers.__version__, "sections": of_trainer()},
    }
    if request.config.getoption("--refresh-golden"):
        arms.DEFAULTS_FILE.write_text(json.dumps(exported, indent=1) + "\n")
    assert json.loads(arms.DEFAULTS_FILE.read_text()) == exported


def test_absent_keys_have_their_defaults():
    zero = arms.zero_optimization({"zero_optimization": {"stage": 3, "sub_group_size": 7}})
    assert (zero["stage"], zero["sub_group_size"], zero["stage3_prefetch_bucket_size"]) == (3, 7, 50_000_000)
    assert arms.zero_optimization(None)["stage"] == 0
