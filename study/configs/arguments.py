"""What a Trainer is asked for by a script, a launch command or a recipe, and where its DeepSpeed config contradicts.

They are compared as transformers compares them (HfTrainerDeepSpeedConfig of 5.23.0, integrations/deepspeed.py:118).
"""

import ast
import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from study.configs import accelerators, code
from study.configs.commands import FLAG, Command, commands_in
from study.configs.settings import AUTO, HALVES, Setting, descriptions, done_by_program, same, zero_section
from study.configs.shown import shown
from study.configs.sources import ACCELERATE, DEEPSPEED, NAMES_ANOTHER, TRAINER, kind_of, plain
from study.configs.syntax import called, function_of, nodes_of, parsed
from study.core.arms import config_of_yaml
from study.core.files import from_json, from_yaml, section_at, value_at
from study.core.library_defaults import library_defaults
from study.core.text import comparable, is_number
from study.known.findings import Finding, finding, texts

TRAINERS = re.compile(r"\w*(?:TrainingArguments|(?:SFT|DPO|GRPO|KTO|ORPO|CPO|Reward|RLOO|PPO)Config)$")
OF_TRAINER = re.compile(r"(?:Seq2Seq)?TrainingArguments")
OF_TRL = re.compile(r"(?:SFT|DPO|GRPO|KTO|ORPO|CPO|Reward|RLOO)Config")
ITS_OWN = ("learning_rate", "bf16")  # of what is compared here: TRL's classes and releases differ in these (1.16.0)
PARSES_ALL = re.compile(r"HfArgumentParser|TrlParser|parse_args_into_dataclasses")
CLIPS, LOADS = re.compile("clip_grad_norm_"), re.compile("from_pretrained")
KNOWS_STAGE = re.compile(rf"Accelerator|HfDeepSpeedConfig|{TRAINERS.pattern}")
SPREADS = ("auto", "balanced", "balanced_low_0", "sequential")
ACCELERATES_CLIPPING = 1.0  # where its yaml has none, or the config auto (accelerator.py:2224 of 1.15.0)
BY_DEFAULT = "DeepSpeed's default (1, before 0.19.3 0)"  # where a JSON has none
RANKS = ("num_gpus", "num_processes", "nproc_per_node")
OF_TRAINERS = {"arguments_contradicted", "arguments_may_contradict"}
SEVERAL_NODES = {"nnodes", "num_nodes", "num_machines"}


@dataclass(frozen=True)
class Arguments:
    """The arguments of a Trainer by its names, and where each stands. `auto`: it is not known."""

    values: Mapping[str, Any]
    places: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of what is not written
    may_be: frozenset[str] = frozenset()  # a command that is not given may say another

    def value(self, name: str) -> Any:
        """Return an argument as it counts, a number as such."""
        value = self.values.get(name)
        if value in (None, "None"):
            value = self.defaults.get(name, AUTO)
        return comparable(value) if is_number(comparable(value)) else value

    def half(self, name: str) -> Any:
        """Return whether a precision of 16 bits is on. Of both the Trainer takes one."""
        on = [self.value(name), self.value(f"{name}_full_eval")]
        other = {"bf16": "fp16", "fp16": "bf16"}[name]
        if True in on or (name not in self.values and self.values.get(other) is True):
            return True in on
        return AUTO if on[0] == AUTO else False

    def place(self, names: str) -> str:
        """Return where arguments stand, in words."""
        for name in names.split(", "):
            if name in self.places:
                return f"({self.places[name]})"
        written = {name for name, value in self.values.items() if value not in (None, "None")}
        unwritten = {*library_defaults("trainer")[""]} - written
        return "by default" if unwritten.issuperset(names.split(", ")) else "in the arguments"


def refused(asked: Arguments, config: Mapping[str, Any], ranks: int | None = None) -> Iterator[Finding]:
    """Yield what a DeepSpeed config says otherwise than the Trainer's arguments."""
    for key, name, value in _compared(asked, ranks):
        written = value_at(dict(config), key)
        if isinstance(value, list) and isinstance(written, list) and len(value) == len(written):
            value = [b if a == AUTO else a for a, b in zip(value, written, strict=True)]
        if written in (None, AUTO) or value == AUTO or (isinstance(value, list) and AUTO in value):
            continue
        is_same = bool(written) is value if isinstance(value, bool) else same(written, value)
        if key == "scheduler.params.warmup_num_steps" and value == 1:  # of no warm-up older releases make 0
            is_same = comparable(written) in (0, 1)
        if not is_same:
            id = "arguments_contradicted" if asked.may_be.isdisjoint(name.split(", ")) else "arguments_may_contradict"
            values = [shown(Setting(each)) for each in (value, written)]
            yield finding(id, deepspeed=key, trainer=name, values=values, place=asked.place(name))


def _compared(asked: Arguments, ranks: int | None) -> Iterator[tuple[str, str, Any]]:
    """Yield each key of DeepSpeed's that the Trainer compares, its own argument, and what that says."""
    rows, passes = map(asked.value, ("per_device_train_batch_size", "gradient_accumulation_steps"))
    if asked.value("auto_find_batch_size") is not True:
        yield "train_micro_batch_size_per_gpu", "per_device_train_batch_size", rows
        if ranks and is_number(rows) and is_number(passes):
            name = f"per_device_train_batch_size x gradient_accumulation_steps x {ranks} ranks"
            yield "train_batch_size", name, rows * passes * ranks
    for key, name in texts()["arguments_contradicted"]["pairs"].items():
        yield key, name, asked.value(name)
    yield "optimizer.params.betas", "adam_beta1, adam_beta2", [*map(asked.value, ("adam_beta1", "adam_beta2"))]
    yield "bf16.enabled", "bf16", asked.half("bf16")
    yield "fp16.enabled", "fp16", asked.half("fp16")
    steps, most = map(asked.value, ("warmup_steps", "max_steps"))
    if is_number(steps) and (steps >= 1 or (steps == 0 and not asked.values.get("warmup_ratio"))):  # below 1: a ratio
        yield "scheduler.params.warmup_num_steps", "warmup_steps", max(1, steps)
    if is_number(most) and most > 0:
        yield "scheduler.params.total_num_steps", "max_steps", most


def of_recipe(content: Mapping[str, Any]) -> Arguments:
    """Return the arguments in a file with the Trainer's names, or with those of axolotl or another program."""
    named = done_by_program(content)
    for each in descriptions().values():
        if each.trainer:
            named.update((each.trainer, content[key]) for key in each.keys if key in content)
    is_whole = "finetuning_type" in content and not content.get("pure_bf16")  # LLaMA-Factory has the Trainer's defaults
    return Arguments(named | dict(content), defaults=_defaults(["TrainingArguments"] if is_whole else []))


def compares(given: Mapping[str, str]) -> bool:
    """Whether a script among texts makes a Trainer or an Accelerator: their arguments are compared with the config."""
    calls = re.compile(rf"{TRAINERS.pattern}|{accelerators.MADE.pattern}")
    return any(name.endswith(".py") and next(code.calls(text, calls), None) for name, text in given.items())


def contradicted(given: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what scripts, commands and recipes say otherwise than a DeepSpeed config among texts, by names of files."""
    contents = {name: content for name, text in given.items() if (content := _content(name, text))}
    commands = [each for name, text in given.items() for each in commands_in(name, text)]
    launched = _launched(contents, commands)
    of_deepspeed = [*launched, *(each for each in contents.values() if kind_of(each) == DEEPSPEED)]
    for name, text in given.items():
        if name.endswith(".py"):
            yield from accelerators.overruled(name, text, contents, commands)
        if name.endswith(".py") and len(launched) == 1:
            yield from _clipped(name, text, launched[0])
        if name.endswith(".py") and of_deepspeed:
            yield from _placed(name, text, of_deepspeed)
    ranks = _ranks(contents, commands)
    for asked in _asked(given, contents, commands):
        config = _config_of(asked, contents, launched, of_deepspeed)
        if isinstance(config, Mapping):
            yield from refused(asked, config, ranks)


def _config_of(asked: Arguments, contents: Mapping[str, dict], launched: list[dict], given: list[dict]) -> Any:
    """Return the DeepSpeed config that a Trainer has, of those `given` or `launched`. None: it is not known."""
    named = asked.values.get("deepspeed")
    if named == AUTO:  # an argument of the script has the name
        return given[0] if len(given) == 1 and not launched else None
    if isinstance(named, str):
        return contents.get(Path(named).name)
    if named or len(launched) != 1:
        return named
    (config,) = launched
    half = config.get("half")  # the Trainer's own precision goes before that of the yaml
    return config | {half: {"enabled": True}} if half and not asked.half("bf16") and not asked.half("fp16") else config


def _ranks(contents: Mapping[str, dict], commands: list[Command]) -> int | None:
    """Return the ranks that commands and yamls start on one node. None: on several, or they say no number, or two."""
    if any(SEVERAL_NODES & each.launcher.keys() for each in commands):
        return None
    said = [str(each.launcher.get(name)) for each in commands for name in RANKS]
    said += [str(each.get("num_processes")) for each in contents.values()]
    numbers = {int(each) for each in said if each.isdigit()}
    return numbers.pop() if len(numbers) == 1 else None


def _clipped(name: str, text: str, launched: dict[str, Any]) -> Iterator[Finding]:
    """Yield where the Accelerator of a script clips at another limit than the launcher's config, which counts."""
    limits: set[float]
    if "gradient_clipping" not in launched:
        limits, counts = {0, 1}, BY_DEFAULT
    else:
        written = launched["gradient_clipping"]
        limit = ACCELERATES_CLIPPING if written == AUTO else comparable(written)
        limits, counts = {limit}, f"{limit:g} of its config"
    for call, values in code.calls(text, CLIPS):
        asked = values.get("max_norm", code.constant(call.args[1]) if len(call.args) > 1 else AUTO)
        is_of_accelerator = isinstance(call.func, ast.Attribute) and "utils" not in function_of(call)
        if is_of_accelerator and is_number(asked) and asked not in limits:
            yield finding("clipping_of_config", counts=counts, asked=asked, place=f"{name}:{call.lineno}")


def _placed(name: str, text: str, configs: list[dict[str, Any]]) -> Iterator[Finding]:
    """Yield the first line that gives from_pretrained a device_map beside DeepSpeed, of which it may know by then."""
    tree = parsed(text)
    if tree is None:
        return
    known = [call for call, _ in code.calls(text, KNOWS_STAGE)]
    is_stage_3 = {zero_section(each).get("stage") for each in configs} == {3}
    for call, _ in code.calls(text, LOADS):
        value = next((each.value for each in call.keywords if each.arg == "device_map"), None)
        if value is None:
            continue
        around = _functions_around(call, tree)
        knows_stage = any(each.lineno < call.lineno and _functions_around(each, tree) == around for each in known)
        is_mapped = isinstance(value, ast.Dict) or (isinstance(value, ast.Constant) and value.value is not None)
        if is_mapped and is_stage_3 and knows_stage:
            yield finding("device_map_refused", value=ast.unparse(value), place=f"{name}:{value.lineno}")
            return
        if isinstance(value, ast.Constant) and value.value in SPREADS:
            yield finding("device_map_spreads", value=ast.unparse(value), place=f"{name}:{value.lineno}")
            return


def _functions_around(call: ast.Call, tree: ast.Module) -> list[ast.FunctionDef]:
    functions = nodes_of(ast.FunctionDef, tree)
    return [each for each in functions if each.lineno <= call.lineno <= (each.end_lineno or 0)]


def _content(name: str, text: str) -> dict[str, Any]:
    """Return the mapping that a config is; an empty one if it is none."""
    with contextlib.suppress(ValueError):
        if name.endswith((".json", ".yaml", ".yml")):
            content = (from_json if name.endswith(".json") else from_yaml)(text)
            return plain(content) if isinstance(content, dict) else {}
    return {}


def _launched(contents: Mapping[str, dict], commands: list[Command]) -> list[dict[str, Any]]:
    """Return the DeepSpeed configs that Accelerate's launcher takes from its yaml or its flags."""
    if commands and not any("accelerate" in each.line for each in commands):
        return []
    flags = dict(commands[0].launcher) if len(commands) == 1 else {}  # they count before a yaml
    if not accelerators.OTHER_ENGINES.isdisjoint(flags):
        return []
    yamls = [each for each in contents.values() if each.get("distributed_type") == "DEEPSPEED"]
    sections = [each | flags | {"deepspeed_config": section_at(each, "deepspeed_config") | flags} for each in yamls]
    if not sections:
        of_flags = [each.launcher for each in commands if {"deepspeed_config_file", "use_deepspeed"} & {*each.launcher}]
        sections = [{**each, "deepspeed_config": each} for each in of_flags]
    launched = []
    for each in sections:
        if file := value_at(each, NAMES_ANOTHER[ACCELERATE]):
            launched += [content for name, content in contents.items() if name == Path(str(file)).name]
        else:
            half = HALVES.get(str(each.get("mixed_precision")).lower())
            launched.append(
                {"gradient_clipping": AUTO}
                | config_of_yaml(section_at(each, "deepspeed_config"))
                | ({"half": half} if half else {})
            )
    return launched


def _asked(given: Mapping[str, str], contents: Mapping[str, dict], commands: list[Command]) -> Iterator[Arguments]:
    """Yield what each Trainer is asked for."""
    for name, text in given.items():
        if name.endswith(".py"):
            yield from _of_script(name, text, [each for each in commands if each.script == name])
    for command in commands:
        if command.script not in given and "deepspeed" in command.flags:
            yield Arguments(command.flags, command.places)
    yield from (of_recipe(each) for each in contents.values() if kind_of(each) == TRAINER)


def _of_script(name: str, text: str, commands: list[Command]) -> Iterator[Arguments]:
    """Yield what a script makes as arguments of a Trainer, and what its commands give it."""
    if PARSES_ALL.search(text):
        for command in commands:
            classes = re.findall(rf"\b{TRAINERS.pattern[:-1]}\b", text)
            asked = code.own_defaults(text) | dict(command.flags)
            is_whole = "$" not in FLAG.sub("", command.line)
            yield Arguments(asked, command.places, _defaults(classes if is_whole else []))
        return
    of_itself = [values for _, values in code.calls(text, TRAINERS)]
    filled, _ = code.with_defaults(text, commands[0].line if len(commands) == 1 else "")
    for (call, values), written in zip(code.calls(filled, TRAINERS), of_itself, strict=True):
        places = {each.arg: f"{name}:{each.value.lineno}" for each in call.keywords if each.arg}
        defaults = _defaults([] if "**" in values else [called(call)])
        may_be = frozenset(() if commands else (each for each in values if written[each] != values[each]))
        yield Arguments(values, places, defaults, may_be)


def _defaults(classes: list[str]) -> dict[str, Any]:
    """Return the defaults of classes of arguments; nothing, where one has its own."""
    defaults = library_defaults("trainer")[""]
    if not classes or not all(OF_TRAINER.fullmatch(each) or OF_TRL.fullmatch(each) for each in classes):
        return {}
    is_of_trl = any(map(OF_TRL.fullmatch, classes))
    return {name: value for name, value in defaults.items() if not (is_of_trl and name in ITS_OWN)}
