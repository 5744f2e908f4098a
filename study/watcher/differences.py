"""Compare two configs or runs: known causes of different losses or memory first, then the other keys."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from study.io.numbers import short
from study.watcher.descriptions import Description, covered_keys, descriptions
from study.watcher.effective import DEFAULTS, EffectiveSettings, Setting, effective_settings
from study.watcher.sources import Source, flat

UNSET = Setting(None, "not set here")
LONGEST = 48  # characters of a value
SECRET = ("token", "password", "secret", "api_key", "credential")
LARGE = 1_000_000  # whole numbers from here on are shown in groups of digits

# Keys that differ between any two runs.
NOISE = (
    "run_id",
    "run_dir",
    "output_dir",
    "logging_dir",
    "started_utc",
    "finished_utc",
    "argv",
    "cache_dir",
    "commit",
    "deepspeed_config_file",
)


@dataclass(frozen=True)
class Difference:
    """A setting in which the two differ. Without a description, its effect is unknown."""

    name: str
    a: Setting
    b: Setting
    description: Description | None = None


@dataclass(frozen=True)
class Comparison:
    known: list[Difference] = field(default_factory=list)
    other: list[Difference] = field(default_factory=list)
    equal: list[str] = field(default_factory=list)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)


def compare(a: Source, b: Source) -> Comparison:
    """Return everything in which the two differ: the effective settings, and the keys as written."""
    first = with_rows(effective_settings(a))
    second = with_rows(effective_settings(b))
    both = [name for name in first if name in second]
    equal = [name for name in both if same(first[name].value, second[name].value)]
    known = _known(first, second)
    if a.kind == b.kind:
        first = first | _raw(a)
        second = second | _raw(b)
    named = {*equal, *(difference.name for difference in known)}
    differ = [name for name in first if name in second and not same(first[name].value, second[name].value)]
    other = [Difference(name, first[name], second[name]) for name in differ if name not in named]
    return Comparison(known, other, equal, _only(first, second, named), _only(second, first, named))


def _known(first: EffectiveSettings, second: EffectiveSettings) -> list[Difference]:
    """Return the differences that are known to change losses or memory."""
    known = []
    for name, each in descriptions().items():
        a = first.get(name, UNSET)
        b = second.get(name, UNSET)
        if each.changes and not same(a.value, b.value) and (UNSET not in (a, b) or _counts_alone(each, a, b)):
            known.append(Difference(name, a, b, each))
    return known


def _counts_alone(description: Description, a: Setting, b: Setting) -> bool:
    """Return whether to report a setting that only one of the two has."""
    value = b.value if a is UNSET else a.value
    return description.unless is not None and not same(value, description.unless)


def _only(side: EffectiveSettings, other: EffectiveSettings, named: set[str]) -> list[str]:
    """Return the settings that only one side has, without the defaults of its library."""
    alone = [name for name in side if name not in other and name not in named]
    return [name for name in alone if side[name].origin not in DEFAULTS.values()]


def with_rows(settings: EffectiveSettings) -> EffectiveSettings:
    """Return the settings with the rows per step, if its factors are known."""
    factors = [settings.get(name, UNSET).value for name in ("rows per pass and rank", "accumulation", "ranks")]
    if "rows per step" in settings or not all(type(factor) is int and factor for factor in factors):
        return settings
    rows, passes, ranks = factors
    product = Setting(rows * passes * ranks, f"{rows} rows x {passes} passes x {ranks} ranks")
    return settings | {"rows per step": product}


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
    covered = covered_keys() | set(NOISE)
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
