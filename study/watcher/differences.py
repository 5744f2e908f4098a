"""Compares two configs or runs: known causes of different losses or memory first, then the other keys."""

import json
from dataclasses import dataclass, field
from typing import Any

from study.io.numbers import short
from study.watcher.causes import CAUSES, KEYS, Cause
from study.watcher.effective import DEFAULT, ZERO, Said, Settings, settings
from study.watcher.sources import RECORD, Source, flat

NOT_SAID = Said(None, "not said here")
LONGEST = 48  # characters of a value
SECRET = ("token", "password", "secret", "api_key", "credential")

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
OF_A_RECORD = ("requested", "observed")


@dataclass(frozen=True)
class Difference:
    """A setting in which the two differ. Without a cause, its effect is unknown."""

    name: str
    a: Said
    b: Said
    cause: Cause | None = None


@dataclass(frozen=True)
class Comparison:
    known: list[Difference] = field(default_factory=list)
    other: list[Difference] = field(default_factory=list)
    equal: list[str] = field(default_factory=list)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)


def compare(a: Source, b: Source) -> Comparison:
    """Everything in which the two differ: first the effective settings, then the keys as written."""
    first, second = (with_rows(settings(source)) for source in (a, b))
    both = [name for name in first if name in second]
    differ = {name for name in both if not same(first[name].value, second[name].value)}
    known = [
        Difference(cause.name, first.get(cause.name, NOT_SAID), second.get(cause.name, NOT_SAID), cause)
        for cause in CAUSES
        if cause.name in differ or _counts_alone(cause, first.get(cause.name), second.get(cause.name))
    ]
    raw_first, raw_second = (_raw(source) for source in (a, b)) if a.kind == b.kind else ({}, {})
    other = [Difference(name, first[name], second[name]) for name in both if name in differ - {c.name for c in CAUSES}]
    other += [
        Difference(name, Said(raw_first[name]), Said(raw_second[name]))
        for name in raw_first
        if name in raw_second and not same(raw_first[name], raw_second[name])
    ]
    named = {difference.name for difference in known}

    def only_in(side: Settings, raw: dict[str, Any], other_side: Settings, other_raw: dict[str, Any]) -> list[str]:
        absent = [name for name in (*side, *raw) if name not in (*other_side, *other_raw, *named)]
        return [name for name in absent if side.get(name, NOT_SAID).why != DEFAULT]

    only_a, only_b = only_in(first, raw_first, second, raw_second), only_in(second, raw_second, first, raw_first)
    return Comparison(known, other, [name for name in both if name not in differ], only_a, only_b)


def _counts_alone(cause: Cause, a: Said | None, b: Said | None) -> bool:
    """Whether to report a setting that only one of the two has."""
    return cause.one_sided and (a is None) != (b is None) and not same((a or b).value, cause.unless)


def with_rows(said: Settings) -> Settings:
    """The settings with the rows per step, if its factors are known."""
    factors = [said.get(name) for name in ("rows per pass and rank", "accumulation", "ranks")]
    if "rows per step" not in said and all(factor and type(factor.value) is int for factor in factors):
        rows, passes, ranks = (factor.value for factor in factors)
        said = said | {"rows per step": Said(rows * passes * ranks, f"{rows} rows x {passes} passes x {ranks} ranks")}
    return said


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal, however numbers are written: 1e-5, 0.00001 and "1e-5" are. 1 and true are not."""
    a, b = (_number(value) for value in (a, b))
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


def _raw(source: Source) -> dict[str, Any]:
    """The keys as written, without what differs between any two runs."""
    if source.kind == RECORD:
        content = {name: source.content[name] for name in OF_A_RECORD}
        content["observed"] = {name: value for name, value in content["observed"].items() if name != "deepspeed"}
        values = flat({**content, "cpu": source.record.hardware.cpu, "devices": len(source.record.hardware.devices)})
    else:
        values = flat(source.content)
        if source.named and source.named.path != source.path:
            values |= flat(source.named.content, f"{source.named.path.suffix.lstrip('.')}: ")
    return {name: value for name, value in values.items() if value is not None and _is_news(name, value)}


def _is_news(name: str, value: Any) -> bool:
    """Whether a key as written is neither covered by our names nor different in any run."""
    return name.rpartition(".")[2] not in {*KEYS, *ZERO, *NOISE} and type(value) is not list


def shown(said: Said, name: str = "") -> str:
    """A value as text for people. Secrets are not shown."""
    if said is NOT_SAID or said.value is None:
        return "not said"
    if is_secret(name):
        return "(not shown)"
    value = said.value
    if type(value) is int and abs(value) >= 1_000_000:
        text = f"{value:,}".replace(",", " ")
    else:
        text = short(value) if isinstance(value, (bool, int, float, str)) else json.dumps(value, default=str)
    return printable(text)


def is_secret(name: str) -> bool:
    return any(part in name.lower() for part in SECRET)


def printable(text: str) -> str:
    """A text from a file as a terminal can show it: short, on one line, without control characters."""
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
