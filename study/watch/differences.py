"""Compare two configs or runs: known causes of different losses or memory first, then the other keys.

Also the mistakes of one config: what a library ignores in silence. What it refuses, it says itself.
"""

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from study.core.arms import OFFLOADS, Library, library_defaults
from study.core.text import short
from study.records.metrics import dig
from study.watch.findings import Finding, finding
from study.watch.sources import (
    ACCELERATE,
    DEEPSPEED,
    OTHER,
    RECORD,
    TRAINER,
    UNSET,
    Description,
    EffectiveSettings,
    Setting,
    Source,
    descriptions,
    effective_settings,
    flat,
    section_at,
    zero_section,
)

LONGEST = 48  # characters of a value
SECRET = ("token", "password", "secret", "api_key", "credential")
MOST_UNKNOWN = 200  # keys that are compared with the library's, which takes milliseconds each
NEAR = 0.85  # similarity of a misspelled key to the right one
LIBRARIES: dict[str, Library] = {
    DEEPSPEED: "deepspeed",
    RECORD: "deepspeed",
    ACCELERATE: "accelerate",
    TRAINER: "trainer",
}
PREFIXES = ("", "fsdp_", "stage3_")  # Accelerate and DeepSpeed add them to keys that lack them


@dataclass(frozen=True)
class Difference:
    """A setting in which the two differ."""

    name: str
    a: Setting
    b: Setting
    description: Description

    @property
    def is_known(self) -> bool:
        """Return whether it explains something. A setting that only one side has counts by its `unless`."""
        unless = self.description.unless
        if self.description.changes is None:
            return False
        values = [side.value for side in (self.a, self.b) if side != UNSET]
        return len(values) == 2 or (unless is not None and not same(values[0], unless))


def compare(a: Source, b: Source) -> tuple[list[Difference], list[Difference]]:
    """Return everything in which the two differ: known causes, and all other keys, also as written."""
    # Keys as written are compared within one kind of file only, because kinds name the same thing in other words.
    first, second = (effective_settings(side) | (_raw(side) if a.kind == b.kind else {}) for side in (a, b))
    known = []
    others = []
    for name in dict.fromkeys((*descriptions(), *first, *second)):
        about = descriptions().get(name, Description())
        difference = Difference(name, first.get(name, UNSET), second.get(name, UNSET), about)
        if same(difference.a.value, difference.b.value):
            continue
        if difference.is_known:
            known.append(difference)
        elif not (difference.a.is_default or difference.b.is_default):  # most keys are in one file only
            others.append(difference)
    return known, others


def equal_by_default(a: Source, b: Source) -> list[str]:
    """Return the settings with an effect that one side has and the other leaves to the library, to the same value."""
    first, second = effective_settings(a), effective_settings(b)
    return [
        name
        for name, about in descriptions().items()
        if about.changes and name in first and name in second
        if first[name].is_default != second[name].is_default and same(first[name].value, second[name].value)
    ]


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal: 1e-5, 0.00001 and "1e-5" are, as YAML reads it. 1 and true are not."""
    return _comparable(a) == _comparable(b)


def _comparable(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_comparable, value))
    # Python counts True as 1, and a stage of 1 is not `true`.
    if isinstance(value, bool):
        return str(value)
    # PyYAML reads 1e-5 as a text: its pattern of a number with an exponent wants a point (yaml/resolver.py:179).
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return value


def _raw(source: Source) -> EffectiveSettings:
    """Return the keys as written that our names do not cover, without what differs between any two runs."""
    # --- all keys of the file, and of the one that it names
    content = source.content
    if source.record is not None:
        content = {name: content[name] for name in ("requested", "observed")}
    values = flat(content)
    if source.named:
        values |= flat(source.named.content)
    # --- without those that are compared by our names, in any kind of file
    covered: set[str] = set()
    for name, each in descriptions().items():
        paths = (name, each.deepspeed, each.accelerate, each.trainer, each.record, *each.keys)
        covered.update(path.rpartition(".")[2] for path in filter(None, paths))
    return {
        name: Setting(value)
        for name, value in values.items()
        if value is not None and type(value) is not list and name.rpartition(".")[2] not in covered
    }


def shown(setting: Setting, name: str = "") -> str:
    """Return a value as text for people. Secrets are not shown, and a stranger's text cannot change the terminal."""
    value = setting.value
    if value is None:
        return "not set"
    if is_secret(name):
        return "(not shown)"
    if isinstance(value, list | dict):
        return printable(json.dumps(value, default=str))
    return printable(short(value))


def is_secret(name: str) -> bool:
    """Return whether a key of this name may hold a secret, such as the token of a hub."""
    return any(part in name.lower() for part in SECRET)


def printable(text: str) -> str:
    """Return a text from a file as a terminal can show it: short, on one line, without control characters."""
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


# --- mistakes within one config ------------------------------------------------------------------------------------


def mistakes(source: Source) -> Iterator[Finding]:
    """Yield what a library ignores in a config; of a record, the keys that DeepSpeed ignored."""
    content = source.content
    if source.record is not None:
        content = source.record.observed.deepspeed or {}
    if source.kind == OTHER:
        yield finding("kind_unknown", name=source.path.name)
        for library in sorted({*LIBRARIES.values()}):
            yield from _mistyped(library, content)
    else:
        yield from _mistyped(LIBRARIES[source.kind], content)
    if source.kind == ACCELERATE:
        kind = str(content.get("distributed_type") or "NO")
        for engine in ("deepspeed", "fsdp"):
            # `accelerate launch` takes the engine from distributed_type, unless a flag such as --use_deepspeed names
            # one (commands/launch.py:1224).
            if content.get(f"{engine}_config") and kind != engine.upper():
                yield finding("section_unused", engine=engine, kind=f"{kind:.40}", needed=engine.upper())
    if source.kind == DEEPSPEED:
        yield from _without_effect(zero_section(content))
    if source.unread:
        yield finding("file_not_read", why=source.unread)
    if source.named:
        yield from mistakes(source.named)


def _mistyped(library: Library, config: dict) -> Iterator[Finding]:
    """Yield near misspellings of the library's keys: a program may keep keys of its own in a config."""
    # DeepSpeed refuses unknown keys in its typed sections (runtime/config_utils.py:110). The top level is read key by
    # key, so a wrong name there is silently the default (runtime/config.py:268).
    for path, known in library_defaults(library).items():
        section = section_at(config, path)
        unknown = [str(key) for key in section if not any(prefix + str(key) in known for prefix in PREFIXES)]
        for key in unknown[:MOST_UNKNOWN]:
            # A key that is nearly one which is written as well is no misspelling of it.
            for near in difflib.get_close_matches(key, known.keys() - section.keys(), n=1, cutoff=NEAR):
                yield finding("key_mistyped", library=library, key=f"{path}.{key:.60}".lstrip("."), near=near)


def _without_effect(zero: dict) -> Iterator[Finding]:
    for part in OFFLOADS:
        # From a yaml no path arrives: `accelerate launch` reads it and does not hand it on, and the files land in
        # ./none (reproductions/nvme_path_from_yaml.py).
        if dig(zero, f"{part}.device") == "nvme" and not dig(zero, f"{part}.nvme_path"):
            yield finding("no_nvme_path_written", part=part)
    # DeepSpeed's page says that this raises an error. Stage 2 ignores it
    # (reproductions/offload_param_without_stage3.py).
    if dig(zero, "offload_param.device") in ("cpu", "nvme") and zero.get("stage") != 3:
        yield finding("offload_param_needs_stage_3")
