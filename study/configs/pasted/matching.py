"""Which known faults does a text speak of? By its releases and settings, and by what was seen.

A wrong guess is worse than none. How sure it is that a fault applies, study/known/which_apply.py says to all commands.
As the answer to what was seen, a fault whose symptom was not seen is only possible.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType

from pydantic import with_config

from study.configs import scripts
from study.configs.pasted.read import Pasted
from study.configs.pasted.tracebacks import ORDER, Sure
from study.configs.pasted.two_releases import mentioned
from study.configs.pasted.words import Sentence, meets
from study.core.files import value_at
from study.core.tables import NO_OTHER_KEYS, read_table
from study.known.faults import ANY, Fault, table
from study.known.stacks import Flags, Stack
from study.known.which_apply import Answer, Applies, which_apply

SYMPTOMS = Path(__file__).with_name("symptoms.toml")
FLAGS = {each.name for each in fields(Flags)}
AUTOCAST = {"bfloat16": "bf16_autocast", "float16": "fp16_autocast"}  # of torch_autocast
CONFIG = {"machines": "machines", "lean_loading": "fsdp_cpu_ram_efficient_loading"}  # what `study diff` calls it
SURE: dict[Answer, Sure] = {"applies": "sure", "likely": "likely", "applies if": "possible"}
STANDS = re.compile(r"\b(?:loss|reward|accuracy) (?:(?:be|does|do|did) )?hang\b")  # which is no process that hangs
SMALLER = re.compile(r"(?i)\b(?:smaller|lower|too small|tiny|shrinks?|divided|1/[\dgN])\b")
LARGER = re.compile(
    r"(?i)\b(?:larger|higher|bigger|huge|too large|explod\w+|multipl\w+|\d+ ?x|times (?:too )?(?:large|high)\w*)\b"
)


@dataclass(frozen=True)
class Match:
    """A known fault of which a text may speak."""

    applies: Applies
    sure: Sure  # that it is what was seen
    is_certain: bool  # it applies, or likely does, whatever was seen
    has_script: bool  # which is given

    @property
    def fault(self) -> Fault:
        return self.applies.fault

    @property
    def is_spoken_of(self) -> bool:
        """Whether its symptom was seen, and one thing alone is open: a setting, or what a script that is given does."""
        is_open = len(self.applies.why) == 1 and (self.has_script or "script" not in self.applies.unknown)
        return self.applies.is_seen and self.applies.may_be_inside and is_open


def symptoms_by_word() -> dict[str, str]:
    """Return the symptoms of the table by all their words."""
    return {other: symptom for symptom, others in table().symptoms.items() for other in [symptom, *others.split()]}


def symptom_of_word(words: str) -> set[str]:
    """Return the symptom that one word is, in the table's words."""
    return {*filter(None, [symptoms_by_word().get(words.strip().lower().replace("_", "-"))])}


def symptoms(said: Sequence[Sentence], signs: set[str]) -> set[str]:
    """Return the symptoms that a person's words, or signs in a log, speak of."""
    others = [each for each in said if not STANDS.search(" ".join(each.words))]  # of which a hang is one
    return {
        name
        for name, row in symptoms_table().items()
        if meets(row.words, others if name == "hang" else said) or signs & {*row.signs}
    }


def asks(seen: set[str]) -> list[str]:
    """Return what would tell more of symptoms."""
    return [row.ask for name, row in symptoms_table().items() if name in seen and row.ask]


@dataclass(frozen=True)
@with_config(NO_OTHER_KEYS)
class Symptom:
    """A row of symptoms.toml. The fields are explained there."""

    words: tuple[str, ...]
    signs: tuple[str, ...]
    ask: str = ""


@functools.cache
def symptoms_table() -> dict[str, Symptom]:
    """Return the rows of symptoms.toml."""
    return read_table(SYMPTOMS, dict[str, Symptom], Symptom)


def flags_of(pasted: Pasted) -> Flags:
    """Return what a text says of the training, as flags."""
    flags = {name: value for name, value in pasted.said.items() if name in FLAGS}
    stage = flags.pop("stage", None)
    if isinstance(stage, int):
        flags["stage"] = stage
    elif stage and stage != "FSDP":
        flags[stage.lower()] = True  # FSDP1, FSDP2, DDP
    if pasted.said.get("precision") in AUTOCAST:
        flags["precision"] = AUTOCAST[pasted.said["precision"]]
    # Who lists one for a question on a training mostly trains with it.
    if listed := [each for each in ("transformers", *table().trainers) if each in pasted.releases]:
        flags.setdefault("trainer", listed[-1].replace("transformers", "trainer"))
    return Flags(**flags)


def stack_of(pasted: Pasted, seen: set[str], of_scripts: Mapping[Path, str]) -> Stack:
    """Return the releases and the training that a text describes. A package that is only mentioned has any release.

    `seen` are symptoms.
    """
    config = {CONFIG[name]: pasted.said[name] for name in CONFIG if name in pasted.said}
    if pasted.said.get("stage") == "FSDP":
        config["engine"] = "FSDP"
    key = functools.partial(value_at, pasted.config.content) if pasted.config else None
    stack = Stack.of(dict.fromkeys(mentioned(pasted.given), ANY) | pasted.releases, flags_of(pasted), config, key)
    worked = {package: apart.works for package, apart in pasted.apart.items()}
    guessed = frozenset({"stage"} if "stage_by" in pasted.said else ())
    stack = replace(stack, key=key, worked=worked, guessed=guessed, seen=symptoms_of_faults(seen, pasted.written))
    of_config = json.dumps(pasted.config.content) if pasted.config else ""
    return replace(stack, shown=scripts.shown(of_scripts, of_config, pasted.text, stack)) if of_scripts else stack


def matches(pasted: Pasted, seen: set[str], of_scripts: Mapping[Path, str] = MappingProxyType({})) -> list[Match]:
    """Return the faults of which a text may speak, the surest first. `seen` are symptoms."""
    found = []
    stages = _stages(pasted)
    for stage in stages:
        for applies in which_apply(stack_of(stage, seen, of_scripts)):
            sure = SURE[applies.answer] if applies.is_seen else "possible"
            is_certain = applies.answer != "applies if" and len(stages) == 1
            found.append(Match(applies, sure, is_certain, has_script=bool(of_scripts)))
    surest: dict[str, Match] = {}  # of several stages
    for match in sorted(found, key=lambda each: (ORDER.index(each.sure), not each.applies.is_seen)):
        surest.setdefault(match.fault.id, match)
    return [*surest.values()]


def _stages(pasted: Pasted) -> list[Pasted]:
    """Return a text as one of each stage, if it speaks of several, as who compares them does."""
    named = re.findall(r"(?i)\bzero[ _-]?(?:stage)?[ _=-]{0,2}([1-3])\b", pasted.text)
    stages = [1, 2] if pasted.is_stage_1_or_2 else sorted({*map(int, named)})
    if "stage" in pasted.said or len(stages) < 2:
        return [pasted]
    return [replace(pasted, said=pasted.said | {"stage": stage}) for stage in stages]


def symptoms_of_faults(seen: set[str], words: str) -> frozenset[str]:
    """Return the symptoms, as faults have them, that were seen and of whose opposite a person does not speak."""
    of_faults = {fault.symptom for fault in table().fault}
    spoken = {symptom for symptom in of_faults if any(name in symptom for name in seen)}
    return frozenset(symptom for symptom in spoken if not _is_opposite(symptom, words))


def _is_opposite(symptom: str, words: str) -> bool:
    """Whether a person speaks of values that are too small where a fault makes them too large, or the other way."""
    smaller, larger = (bool(pattern.search(words)) for pattern in (SMALLER, LARGER))
    if smaller == larger:
        return False
    return (" x " if smaller else " / ") in symptom
