"""Gives configurations to DeepSpeed and Accelerate. `study.conform.trials` starts it as a process of its own.

python -m study.conform.worker < trials.json

It reads a list of trials and writes a list of answers: {"found", "told"}, or {"error"} if the trial itself failed.
Nothing is trained: the configs are parsed for one rank without a process group.
"""

import contextlib
import copy
import dataclasses
import enum
import inspect
import json
import math
import os
import pkgutil
import sys
import tempfile
from pathlib import Path

import yaml

from study.io.validation import nearest
from study.spec import arms

# What Accelerate fills in for "auto" when it prepares (accelerator.py, _prepare_deepspeed), for one row a pass.
PREPARED = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
PLAIN: dict[str, object] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "deepspeed_config": {"zero_stage": 2},
}
PLAIN |= {"num_machines": 1, "num_processes": 1, "main_process_port": 0}
ABSENT, NONE = "absent", "none"
PARTS = ("launcher", "environment", "plugin", "resolved")  # of what a yaml becomes


def main() -> None:
    """Answer every trial. What the libraries print goes to stderr."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.chdir(arms.ROOT)  # the paths in the arms' yamls are relative to it
    with contextlib.redirect_stdout(sys.stderr):
        answers = [answer(trial) for trial in json.load(sys.stdin)]
    sys.stdout.write(json.dumps(answers) + "\n")


def answer(trial: dict) -> dict:
    arguments = {name: value for name, value in trial.items() if name != "what"}
    try:
        value, words = TRIALS[trial["what"]](**arguments)
        return {"found": plain(value), "told": words}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {first_line(error)}"}


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # pydantic's first line only counts errors; the next two lines name the field and the error.
    return "; ".join(lines[:3] if lines and "validation error" in lines[0] else lines[:1]) or type(error).__name__


def plain(value):
    """Return a value as JSON and a claims file can hold it."""
    if value is None:
        return NONE
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value.value, str) else value.name
    if isinstance(value, float) and not math.isfinite(value):
        return "never"
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)  # DeepSpeed has its own integer type, which prints with commas
    return value if isinstance(value, (bool, float, str)) else str(value)


def built(build, look: str):
    """Return what is at `look` in what a function builds with a library, or that the library rejects it."""
    try:
        thing = build()
    except (Exception, SystemExit) as error:
        return "rejected", f"rejected, {type(error).__name__}: {first_line(error)}"
    return ("accepted", "accepted") if look == "accepted" else seen(thing, look)


def deepspeed_config(*, config: dict, look: str = "accepted", ranks: int = 1):
    """Return what DeepSpeed's own parser makes of a config for `ranks` ranks."""
    from unittest.mock import patch

    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig

    with patch.multiple(comm, get_rank=lambda *_, **__: 0, get_world_size=lambda *_, **__: ranks):
        return built(lambda: DeepSpeedConfig(copy.deepcopy(config)), look)


def seen(thing, look: str):
    """Return the value at a dotted path of keys or attributes."""
    for name in look.split("."):
        owner = thing
        thing = owner.get(name, ABSENT) if isinstance(owner, dict) else getattr(owner, name, ABSENT)
        if isinstance(thing, str) and thing == ABSENT:
            known = list(owner) if isinstance(owner, dict) else [each for each in dir(owner) if each[0] != "_"]
            return ABSENT, f"there is no {look}; {nearest(name, known, otherwise='nor a similar name')}"
    return thing, f"{look} is {plain(thing)}"


def accelerate_yaml(*, base: str, change: dict, look: str = "accepted"):
    """Return what `accelerate launch` passes on from a yaml, and what its plugin makes of that.

    `look` is one of accepted; plugin.<attribute>; environment.<NAME>; launcher.<argument>; resolved.<path> of
    DeepSpeed's own config, with "auto" filled in as `Accelerator.prepare` does; else a path in DeepSpeed's dict.
    """
    first, _, rest = look.partition(".")
    return built(lambda: passed_on(merged(base_of(base), change), first), rest if first in PARTS else look)


def passed_on(config: dict, part: str):
    """Return what a yaml becomes: in the launcher's arguments, the environment, the plugin or DeepSpeed's config."""
    from unittest.mock import patch

    from accelerate.utils import DeepSpeedPlugin
    from deepspeed.runtime.config import DeepSpeedConfig

    arguments, environment = launched(config)
    # Only what the launcher sets: the rest of the environment is the user's.
    of_launcher = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    texts = {"launcher": vars(arguments), "environment": of_launcher}.get(part)
    if texts is not None:
        return {name: int(value) if str(value).isdigit() else value for name, value in texts.items()}
    with patch.multiple(os, environ=dict(environment)):
        plugin = DeepSpeedPlugin()
    if part == "plugin":
        return plugin
    return DeepSpeedConfig(prepared(plugin.deepspeed_config)) if part == "resolved" else plugin.deepspeed_config


def base_of(name: str) -> dict:
    return copy.deepcopy(PLAIN) if name == "plain" else yaml.safe_load(arms.all_paths()[name].read_text())


def merged(config: dict, change: dict) -> dict:
    """Return a config with some keys changed, nested ones too. A key changed to "absent" is removed."""
    config = dict(config)
    for name, value in change.items():
        if isinstance(value, dict) and isinstance(config.get(name), dict):
            value = merged(config[name], value)
        config[name] = value
    return {name: value for name, value in config.items() if value != ABSENT}


def launched(config: dict):
    """Return the launcher's arguments, and the environment of every rank."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        parsed = launch.launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
        arguments, defaults, _ = launch._validate_launch_command(parsed)
        arguments.deepspeed_fields_from_accelerate_config = ""
        if config.get("distributed_type") == "DEEPSPEED":
            arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
            _, environment = prepare_deepspeed_cmd_env(arguments)
        else:
            environment = prepare_multi_gpu_env(arguments)
        if file := environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
            environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(arms.find(file))
    return arguments, environment


def prepared(config: dict) -> dict:
    """Return DeepSpeed's dict after `Accelerator.prepare`: without "auto"."""
    config = {name: PREPARED[name] if value == "auto" and name in PREPARED else value for name, value in config.items()}
    config.setdefault("train_micro_batch_size_per_gpu", 1)
    return {name: value for name, value in config.items() if value != "auto" and name != "steps_per_print"}


def resolved(of: str):
    """Return the module, class or function of this name. Another name, such as an import, is a TypeError."""
    thing = pkgutil.resolve_name(of)
    if not (inspect.isclass(thing) or inspect.isfunction(thing) or of in sys.modules):
        raise TypeError(f"{of} is neither a module nor a class or function")
    return thing


def default(*, of: str, field: str):
    """Return the default of a field: of a pydantic model (by name or alias), a dataclass, or a function's argument."""
    thing = resolved(of)
    if hasattr(thing, "model_fields"):
        by_name = {key: info for name, info in thing.model_fields.items() for key in (name, info.alias) if key}
        value = by_name[field].get_default(call_default_factory=True)
    elif dataclasses.is_dataclass(thing):
        info = next(info for info in dataclasses.fields(thing) if info.name == field)
        value = info.default
        if callable(info.default_factory):
            value = info.default_factory()
    elif callable(thing) and field in inspect.signature(thing).parameters:
        value = inspect.signature(thing).parameters[field].default
    else:
        value = getattr(thing, field)
    return value, f"the default of {field} in {of} is {plain(value)}"


def member(*, of: str, name: str):
    """Return whether an enumeration has a member of that name, or a class or module an attribute."""
    thing = resolved(of)
    has = name in thing.__members__ if isinstance(thing, enum.EnumType) else hasattr(thing, name)
    return has, f"{of} has {'' if has else 'no '}{name}"


def constructed(*, of: str, arguments: dict, look: str):
    """Return an attribute of an object built with these arguments, from a dataclass or a pydantic model."""
    thing = resolved(of)
    if not (inspect.isclass(thing) and (dataclasses.is_dataclass(thing) or hasattr(thing, "model_fields"))):
        raise TypeError(f"{of} is neither a dataclass nor a pydantic model")
    return built(lambda: thing(**arguments), look)


TRIALS = {each.__name__: each for each in (deepspeed_config, accelerate_yaml, default, member, constructed)}


if __name__ == "__main__":
    main()
