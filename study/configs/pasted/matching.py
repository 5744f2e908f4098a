"""Which known faults does a text speak of? By its releases and settings, by what was seen, and by words in common.

A wrong guess is worse than none. Sure: all that the fault asks for is said, its release was tested, and what was seen
is its symptom. Likely: the release is in its range, at most its question about the script is open, and the text has its
words, or an upgrade of which the text tells brought the fault, or one setting alone is open. All else is only possible.
"""

import functools
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.version import Version

from study.configs.pasted.read import Pasted
from study.configs.pasted.tracebacks import Sure
from study.configs.pasted.words import Sentence, meets
from study.known.faults import ANY, Fault, Release, table
from study.known.which_apply import Applies, Flags, Stack, which_apply

TABLE = Path(__file__).with_name("symptoms.toml")
STRONG, SOME = 0.35, 0.2  # of the weight of a fault's words
USUAL = {"passes", "ranks"}  # conditions that most trainings with several GPUs have
SMALLER = re.compile(r"(?i)\b(?:smaller|lower|too small|tiny|shrinks?|divided|1/[\dgN])\b")
LARGER = re.compile(
    r"(?i)\b(?:larger|higher|bigger|huge|too large|explod\w+|multipl\w+|\d+ ?x|times (?:too )?(?:large|high)\w*)\b"
)
IDENTIFIERS = re.compile(r"[a-z]\w*[_.]\w+|[A-Za-z]+[A-Z]\w*|\w*[a-zA-Z]\w*\d\w*|\d[\d,.]*\d")


@dataclass(frozen=True)
class Match:
    """A known fault of which a text may speak."""

    applies: Applies
    sure: Sure
    share: float  # of the fault's words that the text has
    is_seen: bool  # its symptom

    @property
    def fault(self) -> Fault:
        return self.applies.fault


def symptoms(said: Sequence[Sentence], signs: set[str]) -> set[str]:
    """Return the symptoms that a person's words, or signs in a log, speak of."""
    rows = {name: row for name, row in _table().items() if name != "plain_words"}
    return {name for name, row in rows.items() if meets(row["words"], said) or signs & {*row["signs"]}}


@functools.cache
def _table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


@functools.cache
def _plain() -> set[str]:
    return {*_table()["plain_words"].split()}


def flags_of(pasted: Pasted) -> Flags:
    """Return what a text says of the training, as flags."""
    said = dict(pasted.said)
    stage = said.pop("stage", None)
    ways = {"FSDP1": "fsdp1", "FSDP2": "fsdp2", "DDP": "ddp"}
    flags: dict[str, Any] = {name: said[name] for name in Flags.__dataclass_fields__ if name in said}
    if isinstance(stage, int):
        flags["stage"] = stage
    elif stage in ways:
        flags[ways[stage]] = True
    precision = str(said.get("precision", ""))
    if precision in ("bfloat16", "float16"):  # of torch_autocast
        flags["precision"] = "bf16_autocast" if precision == "bfloat16" else "fp16_autocast"
    if flags.get("ranks") == 0 or flags.get("passes") == 0:
        flags.pop("ranks", None)
        flags.pop("passes", None)
    if "trainer" not in flags and "transformers" in pasted.releases:
        flags["trainer"] = "trainer"  # who lists transformers for a question on a training mostly trains with it
    return Flags(**flags)


def mentioned(text: str) -> dict[str, Release]:
    """Return the packages of the table that a text names, of any release."""
    return {name: ANY for word, name in table().packages.items() if re.search(rf"(?i)\b{word}\b", text)}


def stack_of(pasted: Pasted) -> Stack:
    """Return the releases and the training that a text describes. A package that is only mentioned has any release."""
    said = pasted.said
    config = {name: said[name] for name in ("machines",) if name in said}
    if "lean_loading" in said:
        config["fsdp_cpu_ram_efficient_loading"] = said["lean_loading"]
    key = functools.partial(_dig, pasted.config) if pasted.config is not None else None
    stack = Stack.of(mentioned(pasted.text) | pasted.releases, flags_of(pasted), config, key)
    return Stack(stack.releases, stack.said, key)


def _dig(config: dict, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def matches(pasted: Pasted, words: str, seen: set[str]) -> list[Match]:
    """Return the faults of which a text may speak, the surest first. `seen` are symptoms."""
    found = [
        _match(applies, pasted, words, seen) for stage in _stages(pasted) for applies in which_apply(stack_of(stage))
    ]
    order = ("sure", "likely", "possible")
    ranked = sorted(found, key=lambda each: (order.index(each.sure), not each.is_seen, -each.share))
    return [*{each.fault.id: each for each in reversed(ranked)}.values()][::-1]  # of several stages the surest


def _stages(pasted: Pasted) -> list[Pasted]:
    """Return a text as one of each stage, if it speaks of several, as who compares them does."""
    stages = sorted({int(each) for each in re.findall(r"(?i)\bzero[ _-]?(?:stage)?[ _=-]{0,2}([1-3])\b", pasted.text)})
    if "stage" in pasted.said or len(stages) < 2:
        return [pasted]
    return [replace(pasted, said=pasted.said | {"stage": stage}) for stage in stages]


def _match(applies: Applies, pasted: Pasted, words: str, seen: set[str]) -> Match:
    fault = applies.fault
    share = _share(fault, words, pasted.text)
    is_seen = any(name in fault.symptom for name in seen) and not _is_opposite(fault.symptom, words)
    open_conditions = {question.condition for question in applies.why}
    if fault.symptom == "slow":  # its script is asked whether time matters: who writes of it has answered
        open_conditions -= {"script"}
    is_inside = isinstance(applies.release, Version) and fault.contains(applies.release)
    sure: Sure = "possible"
    if is_seen and (applies.answer == "applies" or (fault.symptom == "slow" and is_inside and not open_conditions)):
        sure = "sure"
    elif is_seen and is_inside:
        has_words = open_conditions <= {"script"} and share >= STRONG
        came = "script" not in open_conditions and _came_with_an_upgrade(fault, pasted)
        if has_words or came or (len(open_conditions) == 1 and open_conditions <= USUAL):
            sure = "likely"
    return Match(applies, sure, share, is_seen)


def _is_opposite(symptom: str, words: str) -> bool:
    """Whether a person speaks of values that are too small where a fault makes them too large, or the other way."""
    smaller, larger = (bool(pattern.search(words)) for pattern in (SMALLER, LARGER))
    return (" x " in symptom and smaller and not larger) or (" / " in symptom and larger and not smaller)


def _came_with_an_upgrade(fault: Fault, pasted: Pasted) -> bool:
    apart = pasted.apart.get(fault.package)
    return apart is not None and apart.is_said and not fault.contains(apart.works)


def _share(fault: Fault, words: str, text: str) -> float:
    """Return how much of a fault's words a text has, rare words counting more, and identifiers in all of the text."""
    weights = _weights()[fault.id]
    said = {*_tokens(words)}
    found = sum(weight for token, weight in weights.items() if token in said or _is_named(token, text))
    return found / sum(weights.values()) if weights else 0.0


def _is_named(token: str, text: str) -> bool:
    return bool(IDENTIFIERS.fullmatch(token)) and len(token) > 3 and token in text.lower()


@functools.cache
def _weights() -> dict[str, dict[str, float]]:
    tokens = {fault.id: {*_tokens(_words(fault))} for fault in table().fault}
    counts = Counter(token for each in tokens.values() for token in each)
    return {id: {token: _weight(token, counts[token], len(tokens)) for token in each} for id, each in tokens.items()}


def _words(fault: Fault) -> str:
    when = fault.when or {}
    return f"{fault.sentence} {when.get('script', '')} {when.get('keys', '')}"


def _weight(token: str, count: int, number: int) -> float:
    return math.log(number / count) * (2 if IDENTIFIERS.fullmatch(token) else 1)


def _tokens(words: str) -> Iterator[str]:
    for word in re.findall(r"[A-Za-z_][\w.]*\w|\d[\d,.]*\d", words):
        token = word.lower().strip(".,")
        if token not in _plain() and len(token) > 2:
            yield token if IDENTIFIERS.fullmatch(word) else token.removesuffix("s")
