"""Compare two configs or runs: known causes of different losses or memory first, then the other keys.

Also contradictions within one config: what a library would refuse or ignore. Facts of libraries: DeepSpeed 0.19.8,
Accelerate 1.15.0, Transformers 5.23.0.
"""

import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from study.core.arms import DEVICES, NOT_BESIDE_JSON, OFFLOADS
from study.core.library_defaults import Library, sections
from study.core.numbers import short
from study.records.hangs import Finding
from study.records.schema import Record
from study.watch.diagnosis import diagnose
from study.watch.effective import (
    AUTO,
    DEFAULTS,
    Description,
    EffectiveSettings,
    Setting,
    config_of_yaml,
    descriptions,
    effective_settings,
    value_at,
    zero_section,
)
from study.watch.sources import ACCELERATE, DEEPSPEED, TRAINER, Source, flat

UNSET = Setting(None, "not set here")
LONGEST = 48  # characters of a value
SECRET = ("token", "password", "secret", "api_key", "credential")
LARGE = 1_000_000  # whole numbers from here on are shown in groups of digits
NOISE = {  # keys that differ between any two runs
    "run_id", "run_dir", "output_dir", "logging_dir", "started_utc", "finished_utc", "argv", "cache_dir", "commit",
    "deepspeed_config_file",
}  # fmt: skip
# The Trainer compares these with the DeepSpeed config, and refuses to start where both have a number and they differ.
PAIRS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
}
NAMES: dict[Library, str] = {"deepspeed": "DeepSpeed", "accelerate": "Accelerate", "trainer": "the Trainer"}
NEAR = 0.85  # similarity of a misspelled key to the right one
PREFIXES = ("", "fsdp_", "stage3_")  # Accelerate and DeepSpeed add them to keys that lack them


@dataclass(frozen=True)
class Difference:
    """A setting in which the two differ. Without a description, its effect is unknown."""

    name: str
    a: Setting
    b: Setting
    description: Description | None = None


@dataclass(frozen=True)
class Comparison:
    known: list[Difference]
    other: list[Difference]
    equal: list[str]
    only_a: list[str]
    only_b: list[str]


def compare(a: Source, b: Source) -> Comparison:
    """Return everything in which the two differ: the effective settings, and the keys as written."""
    first = effective_settings(a)
    second = effective_settings(b)
    equal = [name for name in first if name in second and same(first[name].value, second[name].value)]
    known = [
        Difference(name, first.get(name, UNSET), second.get(name, UNSET), each)
        for name, each in descriptions().items()
        if each.changes and name not in equal and _counts(each, first.get(name), second.get(name))
    ]
    if a.kind == b.kind:
        first = first | _raw(a)
        second = second | _raw(b)
    named = {*equal, *(difference.name for difference in known)}
    both = [name for name in first if name in second and name not in named]
    differ = [name for name in both if not same(first[name].value, second[name].value)]
    other = [Difference(name, first[name], second[name]) for name in differ]
    return Comparison(known, other, equal, _only(first, second, named), _only(second, first, named))


def _counts(description: Description, a: Setting | None, b: Setting | None) -> bool:
    """Return whether two unequal settings are reported. One that only one side has counts by its `unless`."""
    if a and b:
        return True
    alone = a or b
    return alone is not None and description.unless is not None and not same(alone.value, description.unless)


def _only(side: EffectiveSettings, other: EffectiveSettings, named: set[str]) -> list[str]:
    """Return the settings that only one side has, without the defaults of its library."""
    alone = [name for name in side if name not in other and name not in named]
    return [name for name in alone if side[name].origin not in DEFAULTS.values()]


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal: 1e-5, 0.00001 and "1e-5" are. 1 and true are not."""
    a = _number(a)
    b = _number(b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def _number(value: Any) -> Any:
    if isinstance(value, (bool, list)) or value is None:
        return value
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _raw(source: Source) -> EffectiveSettings:
    """Return the keys as written that our names do not cover, without what differs between any two runs."""
    if source.record is not None:
        hardware = {"cpu": source.record.hardware.cpu, "devices": len(source.record.hardware.devices)}
        observed = {name: value for name, value in source.content["observed"].items() if name != "deepspeed"}
        values = flat({"requested": source.content["requested"], "observed": observed, **hardware})
    else:
        values = flat(source.content)
        if source.named and source.named.path != source.path:
            values |= flat(source.named.content, f"{source.named.path.suffix.lstrip('.')}: ")
    covered = set(NOISE)
    for name, each in descriptions().items():
        paths = (each.deepspeed, each.accelerate, each.trainer, each.record)
        covered |= {name, *each.keys, *(path.rpartition(".")[2] for path in paths if path)}
    return {
        name: Setting(value)
        for name, value in values.items()
        if value is not None and type(value) is not list and re.split(r"[.]|: ", name)[-1] not in covered
    }


def shown(setting: Setting, name: str = "") -> str:
    """Return a value as text for people. Secrets are not shown."""
    value = setting.value
    if value is None:
        return "not set"
    if is_secret(name):
        return "(not shown)"
    if type(value) is int and abs(value) >= LARGE:
        return f"{value:,}".replace(",", " ")
    return printable(short(value) if isinstance(value, (bool, int, float, str)) else json.dumps(value, default=str))


def is_secret(name: str) -> bool:
    return any(part in name.lower() for part in SECRET)


def printable(text: str) -> str:
    """Return a text from a file as a terminal can show it: short, on one line, without control characters."""
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def found_in_one(a: Source, b: Source) -> tuple[list[Finding], list[Finding]]:
    """Return the findings of each of two records that the other does not have. Configs have none."""
    if a.record is None or b.record is None:
        return [], []
    first = diagnose(a.record)
    second = diagnose(b.record)
    only_a = [each for each in first if each.id not in {other.id for other in second}]
    return only_a, [each for each in second if each.id not in {other.id for other in first}]


# --- contradictions within one config ------------------------------------------------------------------------------


def contradictions(source: Source) -> list[str]:
    """Return a sentence for each mistake, with its remedy after a colon and without its full stop.

    Of a record, whose run has started: the keys that DeepSpeed ignored.
    """
    deepspeed = source.named.content if source.named else None
    if source.record is not None:
        return ignored_keys(source.record)
    if source.kind == DEEPSPEED:
        return list(_in_deepspeed(source.content))
    missing = [f"{source.unread}: correct the path"] if source.unread else []
    if source.kind == ACCELERATE:
        return [*missing, *_in_accelerate(source.content, deepspeed)]
    return [*missing, *_in_arguments(source.content, deepspeed, source.kind == TRAINER)]


def ignored_keys(record: Record) -> list[str]:
    """Return a sentence for each key that DeepSpeed ignored in a run."""
    return list(_mistyped_keys("deepspeed", record.observed.deepspeed or {}))


def _mistyped_keys(library: Library, config: dict) -> Iterator[str]:
    """Yield a sentence for each key that the library does not have.

    Of keys that it ignores, only near misspellings: a program may keep keys of its own in a config.
    """
    for path, known in sections(library).items():
        section = value_at(config, path)
        refused = {"trainer": False, "accelerate": path == "", "deepspeed": path != ""}[library]
        for key in section if isinstance(section, dict) else ():
            if any(prefix + str(key) in known for prefix in PREFIXES):
                continue
            near = difflib.get_close_matches(str(key), known.keys() - section.keys(), n=1, cutoff=NEAR)
            if near or refused:
                remedy = f"write {near[0]}" if near else "remove it"
                inside = f" in {path}" if path else ""
                verb = "refuses" if refused else "ignores"
                yield f"{NAMES[library]} has no key {key:.60}{inside} and {verb} it: {remedy}"


def _in_arguments(arguments: dict, deepspeed: dict | None, is_trainer: bool) -> Iterator[str]:
    if is_trainer:
        yield from _mistyped_keys("trainer", arguments)
    if arguments.get("bf16") is True and arguments.get("fp16") is True:
        yield "bf16 and fp16 are both true, which the Trainer refuses: set one of them to false"
    if not deepspeed:
        return
    for ours, theirs in PAIRS.items():
        in_json = value_at(deepspeed, ours)
        argument = arguments.get(theirs)
        are_numbers = all(isinstance(value, bool | int | float) for value in (in_json, argument))
        if are_numbers and not same(in_json, argument):
            yield (
                f"{ours} is {in_json} in the DeepSpeed config and {theirs} is {argument} in the arguments, which the "
                'Trainer refuses: write "auto" into the DeepSpeed config'
            )
    yield from _in_deepspeed(deepspeed)


def _in_accelerate(config: dict, deepspeed: dict | None) -> Iterator[str]:
    kind = str(config.get("distributed_type") or "NO")
    yield from _mistyped_keys("accelerate", config)
    for engine in ("deepspeed", "fsdp"):
        if config.get(f"{engine}_config") and kind != engine.upper():
            problem = f"{engine}_config is not used, because distributed_type is {kind:.40}"
            yield f"{problem}: write {engine.upper()}, or remove the section"
    section = config.get("deepspeed_config")
    if kind != "DEEPSPEED" or not isinstance(section, dict):
        return
    if not section.get("deepspeed_config_file"):
        yield from _in_deepspeed(config_of_yaml(section))
        return
    doubled = [name for name in NOT_BESIDE_JSON if name in section]
    if config.get("mixed_precision") is not None:
        doubled.append("mixed_precision")
    if doubled:
        problem = f"{' and '.join(doubled)} beside deepspeed_config_file, which Accelerate refuses"
        yield f"the yaml has {problem}: set this in the DeepSpeed config only"
    if deepspeed:
        yield from _in_deepspeed(deepspeed, config.get("num_processes"))


def _in_deepspeed(config: dict, ranks: int | None = None) -> Iterator[str]:
    yield from _mistyped_keys("deepspeed", config)
    if value_at(config, "bf16.enabled") is True and value_at(config, "fp16.enabled") is True:
        yield "bf16 and fp16 are both enabled, which DeepSpeed refuses: switch one of them off"
    yield from _wrong_values(config)
    zero = zero_section(config)
    for part in OFFLOADS:
        device = value_at(zero, f"{part}.device")
        if device not in (None, *DEVICES):
            yield f"{part} has the device {device!r:.40}, which DeepSpeed refuses: write cpu, nvme or none"
        elif device == "nvme" and not value_at(zero, f"{part}.nvme_path") and zero.get("stage") == 3:
            yield f"{part} has the device nvme and no path: give nvme_path in a DeepSpeed json"
    if value_at(zero, "offload_param.device") in ("cpu", "nvme") and zero.get("stage", 0) != 3:
        yield "offload_param works in stage 3 only: use stage 3, or remove it"
    yield from _batch(config, ranks)


def _wrong_values(config: dict) -> Iterator[str]:
    """Values that DeepSpeed refuses wherever they stand: no section where one is needed, no stage, negative sizes.

    It takes true and false for zero_optimization, and null for any other section.
    """
    for path in filter(None, sections("deepspeed")):
        parent, _, name = path.rpartition(".")
        around = value_at(config, parent)
        value = around.get(name, {}) if isinstance(around, dict) else {}
        may_be = (bool, dict) if path == "zero_optimization" else (dict, type(None))
        if not isinstance(value, may_be):
            yield f"{path} is {json.dumps(value):.40}, which DeepSpeed refuses: write a section in braces"
    section = config.get("zero_optimization")
    zero = section if isinstance(section, dict) else {}
    if zero.get("stage", 0) not in (0, 1, 2, 3, *"0123", AUTO):
        yield f"stage is {json.dumps(zero['stage']):.40}, which DeepSpeed refuses: write 0, 1, 2 or 3"
    for name, value in zero.items():
        if isinstance(value, int | float) and value < 0:
            yield f"{name} is {value}, which DeepSpeed refuses: write 0 or more"


def _batch(config: dict, ranks: int | None) -> Iterator[str]:
    """DeepSpeed refuses rows of a step that are not rows per pass x passes x ranks."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    sizes: list[Any] = [config.get(name) for name in names]
    if not all(type(size) is int and size > 0 for size in sizes):
        return
    rows, micro, passes = sizes
    product = f"a multiple of {micro} rows x {passes} passes"
    wrong = rows % (micro * passes) != 0
    if type(ranks) is int and ranks > 0:
        product = f"{micro} rows x {passes} passes x {ranks} ranks"
        wrong = rows != micro * passes * ranks
    if wrong:
        yield f"train_batch_size is {rows} and not {product}, which DeepSpeed refuses: remove train_batch_size"
