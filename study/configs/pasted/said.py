"""What a text says of a training, by conditions: settings, flags and what logs print, as said.toml has them."""

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import with_config

from study.configs.pasted.words import only
from study.core.tables import NO_OTHER_KEYS, Regex, read_table
from study.known.findings import finding, in_a_sentence

SAID = Path(__file__).with_name("said.toml")
TRUTH = {"true": True, "false": False}
# As Python, Rich and IPython name the file of a frame, and warnings theirs.
FRAMES_FILE = re.compile(r'File "[^"\n]+"|(?a:(?<![\w.~/\\-])[\w.~/\\-]{1,300}\.py:\d+)')
# Behind a word: a value that turns it off. `no` and 0 may begin something else, if they do not end a line or a value.
OFF = re.compile(
    r"""(?im)["']?(?:\s*(?:[:=]|\.{2,})\s*(?:\{\s*["']?enabled["']?\s*:\s*)?|[ \t]+(?:(?:is|was|are)[ \t]+)?)"""
    r"""["']?(?:(?:false|none|null|disabled)\b|(?:no|off|0)(?=["']?[ \t]*(?:[,;)}\]\r\n]|$)))"""
)
# Of a config. It is a hint at what the file has.
FILE_NAME = re.compile(r"(?<![\w./-])[\w./-]{1,200}\.(?:json|ya?ml)\b")
OF_STAGE = ("stage", "fsdp", "ddp")
DASHED = re.compile(r"(?<=--)(?:per|gradient|max|model|lora|load|use)-[a-z-]+(?=[ =])")  # as argparse takes them, too
CONSTANT = re.compile(r"(?m)^(?:export )?([A-Z][A-Z0-9_]{2,39}) ?= ?(\d{1,9})[ \t]*(?:#.*)?$")


def said(text: str) -> dict[str, Any]:
    """Return what a text says, by conditions. One that shards decides what the training is.

    `stage_by` is the file whose name alone says the stage: it is no condition.
    """
    text = DASHED.sub(lambda flag: flag[0].replace("-", "_"), _with_constants(text))
    values = {condition: _value(tried, text) for condition, tried in levels().items() if condition not in OF_STAGE}
    if values["fsdp_own"]:
        beside = levels()["fsdp_own"][0].compiled.sub("", text)
        values["fsdp_launched"] = _value(levels()["fsdp_launched"], beside)
    found = {condition: value for condition, value in values.items() if value is not None}
    if ranks := _ranks_of_batch(found):
        found.setdefault("ranks", ranks)
    per_machine = found.pop("per_machine", None)
    if per_machine and found.get("machines", 1) > 1 and found.get("ranks", per_machine) == per_machine:
        found["ranks"] = per_machine * found["machines"]
    found.pop("total_batch", None)
    prompt, completion = found.pop("prompt", 0), found.pop("completion", 0)
    if prompt and completion:
        found.setdefault("sequence", prompt + completion)
    stage = _stage(FILE_NAME.sub("", text), text, found)
    if stage is None and (stage := _stage(text, text, found)) is not None:
        names = [name for name in FILE_NAME.findall(text) if _stage(f"--deepspeed {name} ", name, {}) == stage]
        found["stage_by"] = names[0] if names else "a file"
    return found if stage is None else {**found, "stage": stage}


def _stage(text: str, whole: str, found: Mapping[str, Any]) -> int | str | None:
    """Return what divides a training: a stage of ZeRO, FSDP1, FSDP2, FSDP of one or the other version, or DDP.

    `whole` is the text with the names of files: where one is of another engine, it is not DDP. `found` is what a text
    says besides: of the Trainer's FSDP a release decides (`fsdp_of_trainer` of study/known/which_apply.py).
    """
    stage, fsdp, ddp = (_value(levels()[condition], text) for condition in OF_STAGE)
    if stage is not None:
        return stage
    for each in ("fsdp_launched", "fsdp_own", "fsdp_ran"):
        if each in found:
            return f"FSDP{found[each]}"
    if fsdp is not None or "fsdp_argument" in found:
        return f"FSDP{fsdp or ''}"
    return "DDP" if ddp and not re.search("(?i)deepspeed|fsdp", whole) else None


def left_open(said: Mapping[str, Any]) -> Iterator[str]:
    """Yield what decides the engine, or its version, where what is said leaves that open."""
    stage, own = said.get("stage"), said.get("fsdp_own")
    if stage == "FSDP":
        yield in_a_sentence(finding("fsdp_of_trainer"))
    elif own and stage in ("FSDP1", "FSDP2") and stage != f"FSDP{own}":
        yield in_a_sentence(finding("fsdp_version_unread", version=own, engine=stage))
    if name := said.get("stage_by"):
        yield in_a_sentence(finding("engine_by_name", name=f"{name:.100}"))


def _with_constants(text: str) -> str:
    """Return a text with its numbers for their names: after `MAX_LEN = 4096` it may say `max_length=MAX_LEN`."""
    for name, number in CONSTANT.findall(text):
        text = re.sub(rf"(?<=[=:( ])(?:\$\{{?)?{name}\b\}}?|(?<=[\"'])\$\{{?{name}\b\}}?", number, text)
    return text


def _ranks_of_batch(said: dict[str, Any]) -> int | None:
    """Return by how many ranks a batch of all is divided. None: too little is said, or it does not divide."""
    total, rows, passes = (said.get(name) for name in ("total_batch", "micro_batch", "passes"))
    if not total or not rows or not passes or total % (rows * passes):
        return None
    return total // (rows * passes)


def _value(tried: list["Level"], text: str) -> Any:
    """Return the value of the first level that says one. None: none does, or it says two."""
    for each in tried:
        if values := {*_values(each, text)}:
            return only(values)
    return None


@functools.lru_cache(maxsize=1)
def _without_paths(text: str) -> str:
    """Return a text without the files of tracebacks: they say which code ran, and no setting."""
    return FRAMES_FILE.sub("File", text)


def numbers(condition: str, text: str) -> set[int]:
    """Return all numbers that a text has of a condition, also where two trainings differ in it."""
    found = {value for each in levels()[condition] for value in _values(each, text)}
    return {each for each in found if isinstance(each, int)}


@dataclass(frozen=True)
@with_config(NO_OTHER_KEYS)
class Level:
    """A row of said.toml. The fields are explained there."""

    pattern: Regex
    value: Any = None
    paths: bool = False

    @functools.cached_property
    def compiled(self) -> re.Pattern:
        return re.compile(self.pattern, re.IGNORECASE | re.MULTILINE | re.ASCII)  # a Chinese character ends a word


@functools.cache
def levels() -> dict[str, list[Level]]:
    """Return the rows of said.toml, by conditions."""
    return read_table(SAID, dict[str, list[Level]], Level)


def _values(tried: Level, text: str) -> Iterator[Any]:
    """Yield what a pattern finds and no value turns off, or the pattern's own value where it has one."""
    if not tried.paths:
        text = _without_paths(text)
    for match in tried.compiled.finditer(text):
        if OFF.match(text, match.end()):
            continue
        if tried.value is not None:
            yield tried.value
            return
        if word := next(filter(None, match.groups()), "").lower().replace(",", ""):
            yield int(word) if word.isdigit() else TRUTH.get(word, word)
