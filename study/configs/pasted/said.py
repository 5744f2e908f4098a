"""What a text says of a training, by conditions: settings, flags and what logs print, as said.toml has them."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NotRequired

from pydantic import with_config
from typing_extensions import TypedDict

from study.configs.pasted.words import only
from study.core.tables import NO_OTHER_KEYS, Regex, read_table

SAID = Path(__file__).with_name("said.toml")
TRUTH = {"true": True, "false": False}
# As Python, Rich and IPython name the file of a frame, and warnings theirs.
FRAMES_FILE = re.compile(r'File "[^"\n]+"|(?a:(?<![\w.~/\\-])[\w.~/\\-]{1,300}\.py:\d+)')
# Behind a word: a value that turns it off. `no` and 0 may begin something else, if they do not end a line or a value.
OFF = re.compile(
    r"""(?im)["']?(?:\s*(?:[:=]|\.{2,})\s*(?:\{\s*["']?enabled["']?\s*:\s*)?|[ \t]+(?:(?:is|was|are)[ \t]+)?)"""
    r"""["']?(?:(?:false|none|null|disabled)\b|(?:no|off|0)(?=["']?[ \t]*(?:[,;)}\]\r\n]|$)))"""
)
DASHED = re.compile(r"(?<=--)(?:per|gradient|max|model|lora|load|use)-[a-z-]+(?=[ =])")  # as argparse takes them, too
CONSTANT = re.compile(r"(?m)^(?:export )?([A-Z][A-Z0-9_]{2,39}) ?= ?(\d{1,9})[ \t]*(?:#.*)?$")


def said(text: str) -> dict[str, Any]:
    """Return what a text says, by conditions. One that shards decides what the training is."""
    text = DASHED.sub(lambda flag: flag[0].replace("-", "_"), _with_constants(text))
    values = {condition: _value(tried, text) for condition, tried in levels().items()}
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
    fsdp, ddp = found.pop("fsdp", None), found.pop("ddp", None)
    if "stage" in found:
        return found
    if fsdp:
        found["stage"] = f"FSDP{fsdp}"
    elif ddp and not re.search("(?i)deepspeed|fsdp", text):
        found["stage"] = "DDP"
    return found


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


def _value(tried: list["SaidPattern"], text: str) -> Any:
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


@with_config(NO_OTHER_KEYS)
class Level(TypedDict):
    """A row of said.toml. The keys are explained there."""

    pattern: Regex
    value: NotRequired[Any]
    paths: NotRequired[bool]


class SaidPattern(NamedTuple):
    pattern: re.Pattern
    value: Any
    reads_paths: bool  # of the files of tracebacks


@functools.cache
def levels() -> dict[str, list[SaidPattern]]:
    """Return the patterns of said.toml with their values, by conditions."""
    rows = read_table(SAID, dict[str, list[Level]], Level)
    flags = re.IGNORECASE | re.MULTILINE | re.ASCII  # a Chinese character beside a word ends it
    return {
        name: [SaidPattern(re.compile(row["pattern"], flags), row.get("value"), row.get("paths", False)) for row in of]
        for name, of in rows.items()
    }


def _values(tried: SaidPattern, text: str) -> Iterator[Any]:
    """Yield what a pattern finds and no value turns off, or the pattern's own value where it has one."""
    pattern, value, reads_paths = tried
    if not reads_paths:
        text = _without_paths(text)
    for match in pattern.finditer(text):
        if OFF.match(text, match.end()):
            continue
        if value is not None:
            yield value
            return
        if word := next(filter(None, match.groups()), "").lower().replace(",", ""):
            yield int(word) if word.isdigit() else TRUTH.get(word, word)
