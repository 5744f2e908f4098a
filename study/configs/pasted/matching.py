"""Which known faults does a text speak of? By its releases and settings, and by what was seen.

A wrong guess is worse than none. Sure: all that the fault asks for is said, its release was tested, and what was seen
is its symptom. Likely: the release is in its range, and an upgrade of which the text tells brought the fault, or one
setting alone is open that most trainings have. All else is only possible.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NotRequired

from packaging.version import Version
from pydantic import with_config
from typing_extensions import TypedDict

from study.configs.pasted.read import Pasted
from study.configs.pasted.tracebacks import Sure
from study.configs.pasted.words import Sentence, meets
from study.core.tables import NO_OTHER_KEYS, read_table
from study.known.faults import ANY, Fault, Release, table
from study.known.which_apply import Applies, Flags, Stack, which_apply

SYMPTOMS = Path(__file__).with_name("symptoms.toml")
USUAL = {"passes", "ranks"}  # conditions that most trainings with several GPUs have
SMALLER = re.compile(r"(?i)\b(?:smaller|lower|too small|tiny|shrinks?|divided|1/[\dgN])\b")
LARGER = re.compile(
    r"(?i)\b(?:larger|higher|bigger|huge|too large|explod\w+|multipl\w+|\d+ ?x|times (?:too )?(?:large|high)\w*)\b"
)


@dataclass(frozen=True)
class Match:
    """A known fault of which a text may speak."""

    applies: Applies
    sure: Sure
    is_seen: bool  # its symptom

    @property
    def fault(self) -> Fault:
        return self.applies.fault


def symptoms(said: Sequence[Sentence], signs: set[str]) -> set[str]:
    """Return the symptoms that a person's words, or signs in a log, speak of."""
    return {name for name, row in symptoms_table().items() if meets(row["words"], said) or signs & {*row["signs"]}}


def asks(seen: set[str]) -> list[str]:
    """Return what would tell more of symptoms."""
    return [row["ask"] for name, row in symptoms_table().items() if name in seen and "ask" in row]


@with_config(NO_OTHER_KEYS)
class Symptom(TypedDict):
    """A row of symptoms.toml. The keys are explained there."""

    words: list[str]
    signs: list[str]
    ask: NotRequired[str]


@functools.cache
def symptoms_table() -> dict[str, Symptom]:
    return read_table(SYMPTOMS, dict[str, Symptom], Symptom)


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
    ranked = sorted(found, key=lambda each: (order.index(each.sure), not each.is_seen))
    return [*{each.fault.id: each for each in reversed(ranked)}.values()][::-1]  # of several stages the surest


def _stages(pasted: Pasted) -> list[Pasted]:
    """Return a text as one of each stage, if it speaks of several, as who compares them does."""
    stages = sorted({int(each) for each in re.findall(r"(?i)\bzero[ _-]?(?:stage)?[ _=-]{0,2}([1-3])\b", pasted.text)})
    if "stage" in pasted.said or len(stages) < 2:
        return [pasted]
    return [replace(pasted, said=pasted.said | {"stage": stage}) for stage in stages]


def _match(applies: Applies, pasted: Pasted, words: str, seen: set[str]) -> Match:
    fault = applies.fault
    is_seen = any(name in fault.symptom for name in seen) and not _is_opposite(fault.symptom, words)
    open_conditions = {question.condition for question in applies.why}
    if fault.symptom == "slow":  # its script is asked whether time matters: who writes of it has answered
        open_conditions -= {"script"}
    is_inside = isinstance(applies.release, Version) and fault.contains(applies.release)
    sure: Sure = "possible"
    if is_seen and (applies.answer == "applies" or (fault.symptom == "slow" and is_inside and not open_conditions)):
        sure = "sure"
    elif is_seen and is_inside:
        came = "script" not in open_conditions and _came_with_an_upgrade(fault, pasted)
        if came or (len(open_conditions) == 1 and open_conditions <= USUAL):
            sure = "likely"
    return Match(applies, sure, is_seen)


def _is_opposite(symptom: str, words: str) -> bool:
    """Whether a person speaks of values that are too small where a fault makes them too large, or the other way."""
    smaller, larger = (bool(pattern.search(words)) for pattern in (SMALLER, LARGER))
    return (" x " in symptom and smaller and not larger) or (" / " in symptom and larger and not smaller)


def _came_with_an_upgrade(fault: Fault, pasted: Pasted) -> bool:
    apart = pasted.apart.get(fault.package)
    return apart is not None and not fault.contains(apart.works)
