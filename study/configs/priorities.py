"""Which known faults a reader hears of first: what applies, what was seen, and what is said of the training."""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from packaging.version import Version

from study.configs import scripts
from study.configs.pasted import losses, matching
from study.configs.pasted.words import sentences
from study.core.errors import Stop, nearest
from study.known import lists
from study.known.faults import Fault, table
from study.known.stacks import Flags, Stack
from study.known.which_apply import Applies, which_apply

MOST_MAY = 5  # faults that may apply: a reader of 50 reads none
MOST_LIKELY = 3
FEW_RELEASES = 4  # tested ones with a fault that came and went
USUAL = {"stage", "ranks", "cuda", "trainer", "offload", "script"}  # conditions that say little of a training
METHOD = re.compile("GRPO|DPO|ORPO|CPO|KTO|RLOO|GKD|PPO")
NAMED_METHOD = re.compile(f"(?<![a-z])(?:{METHOD.pattern})", re.IGNORECASE)  # also GRPOTrainer, but not endpoint
MOST_HAVE = {"precision": {"bf16", "bf16_autocast"}, "optimizer": {"adamw"}}


@dataclass(frozen=True)
class AskedStack:
    """What somebody asks of a stack: what is said of the training, and what was seen."""

    stack: Stack
    has_config: bool
    said: set[str]  # conditions of which a flag or the config speaks
    seen: set[str]  # symptoms
    text: str = ""  # of the files and words, and what was seen
    has_no_deepspeed: bool = False  # a whole list is given, without it
    has_script: bool = False
    told: Collection[str | None] = ()  # faults that a finding has told, with the line

    @classmethod
    def of(
        cls, stack: Stack, flags: Flags, config: Path | None, symptom: str | None, words: tuple[str, ...] = ()
    ) -> Self:
        said = {*flags.given}
        if config:
            said |= {*stack.said, "keys"}
        texts = [lists.content(word) for word in words]
        is_left_out = "deepspeed" not in stack.releases and any(map(lists.is_whole_list, texts))
        seen = symptoms(symptom) if symptom else set()
        stack = replace(stack, seen=matching.symptoms_of_faults(seen, symptom or ""))
        has_script = any(map(scripts.is_script, words))
        return cls(stack, config is not None, said, seen, "\n".join([*texts, symptom or ""]), is_left_out, has_script)

    @property
    def says_no_stage(self) -> bool:
        return not self.has_config and "stage" not in self.stack.said

    def is_of_other_method(self, each: Applies) -> bool:
        """Whether a fault is asked of a method, such as GRPO, that nothing names. Few train by one."""
        question = each.fault.asks.get("script", "")
        if not question.startswith("Is it "):  # others name a method as an example
            return False
        methods = METHOD.findall(question)
        named = {method.upper() for method in NAMED_METHOD.findall(self.text)}
        return bool(methods) and named.isdisjoint(methods)

    def lacks(self, fault: Fault) -> bool:
        """Whether a fault needs DeepSpeed, which the list of this training does not have."""
        if not self.has_no_deepspeed:
            return False
        ways = fault.conditions.get("stage", [])
        is_of_zero = isinstance(ways, list) and bool(ways) and all(isinstance(way, int) for way in ways)
        return is_of_zero or "deepspeed" in fault.conditions

    def met(self, each: Applies) -> int:
        """Return how many conditions of a fault are said and so, without those of almost all trainings."""
        return len(({*each.fault.conditions} - USUAL - each.unknown) & self.said)

    def is_left_open_once(self, each: Applies) -> bool:
        """Whether a script and the releases leave one question open, and none of the release itself.

        A release older than all that were tested most likely has what the oldest of them has, unless that needs a key
        of a config, which may be younger: it counts where a condition is met that says more of a training.
        """
        if not self.has_script or not isinstance(each.release, Version) or len(each.why) != 1:
            return False
        oldest = each.fault.tested[0]
        is_older = each.release < oldest and each.fault.contains(oldest)
        is_met = "keys" not in each.fault.conditions and bool({*each.fault.conditions} - USUAL - each.unknown)
        return (each.may_be_inside and each.is_tested) or (is_older and is_met)

    def order(self, each: Applies) -> tuple:
        """What was seen comes first, then what has the least open."""
        is_open = not self.is_left_open_once(each)
        return (not each.is_seen, not is_nearly_decided(each), is_open, -self.weight(each))

    def weight(self, each: Applies) -> int:
        """Return how much of what is special in a fault is said."""
        # Trainers and PEFT have few faults, and who names one asks about it. But few train by one method, such as DPO.
        is_decided_by_flags = all(question.flag for question in each.why)  # nobody has to look at the script
        is_of_many = each.fault.package in (*table().trainers, "PEFT") and is_decided_by_flags
        return 2 * self.met(each) + is_of_many


@dataclass(frozen=True)
class Ranked:
    """Faults in the order in which people want to read them."""

    applying: list[Applies]
    likely: list[Applies]
    may: list[Applies]
    spoken: list[Applies]  # of those that may: what was seen or is spoken of, and else the likeliest

    @property
    def every(self) -> list[Applies]:
        return [*self.applying, *self.likely, *self.may]


def ranked(asked: AskedStack) -> Ranked:
    """Return the faults that apply, or may. What was seen comes first, and of that what meets most of what is said."""
    faults = [each for each in which_apply(asked.stack) if not asked.lacks(each.fault)]
    faults = [each for each in faults if each.fault.id not in asked.told]
    faults.sort(key=lambda each: -1 - asked.met(each) if each.is_seen else 0)
    applying = [each for each in faults if each.answer == "applies"]
    of_likely = [each for each in faults if each.answer == "likely"]
    may = [each for each in faults if each.answer == "applies if"]
    spoken = spoken_of(asked, may)
    if not asked.seen and not applying and (asked.says_no_stage or not spoken):
        guessed = likely(asked, may)
        spoken = [*guessed, *(each for each in spoken if each not in guessed)][:MOST_MAY]
    return Ranked(applying, of_likely, may, spoken)


def spoken_of(asked: AskedStack, may: list[Applies]) -> list[Applies]:
    """Return faults that may apply and have the symptom, are nearly decided, or of which something special is said."""
    spoken = []
    for each in may:
        if asked.is_of_other_method(each):
            continue
        is_special = each.may_be_inside and asked.weight(each)
        if each.is_seen or is_special or is_nearly_decided(each) or asked.is_left_open_once(each):
            spoken.append(each)
    spoken.sort(key=asked.order)
    return spoken[:MOST_MAY]


def is_nearly_decided(each: Applies) -> bool:
    """Whether a fault came and went within few releases, this one among them, and one flag decides if it applies."""
    fault = each.fault
    if not isinstance(each.release, Version) or not fault.contains(each.release):
        return False
    if len(each.why) != 1 or not each.why[0].flag:
        return False
    if fault.contains(fault.tested[0]) or fault.contains(fault.tested[-1]):
        return False  # it may reach further
    return sum(map(fault.contains, fault.ever_tested)) <= FEW_RELEASES


def likely(asked: AskedStack, may: list[Applies]) -> list[Applies]:
    """Return some of the faults in whose range these releases are, the likeliest first."""
    has_peft = "PEFT" in asked.stack.releases

    def place(each: Applies) -> tuple:
        when: dict[str, Any] = each.fault.conditions
        has_adapters = has_peft and when.get("peft") is True
        is_silent = each.fault.symptom.startswith(table().silent)
        # Most train in bf16 with AdamW: faults of fp16, or of another optimizer, are for few.
        is_unusual = any(usual.isdisjoint(when.get(name, usual)) for name, usual in MOST_HAVE.items())
        is_named = isinstance(each.release, Version)
        is_open = not all(question.flag or question.condition == "keys" for question in each.why)
        return (is_unusual, is_open, not is_silent, not has_adapters, not is_named, not each.is_tested)

    inside = [each for each in may if each.may_be_inside and not asked.is_of_other_method(each)]
    return sorted(inside, key=place)[:MOST_LIKELY]


def symptoms(words: str) -> set[str]:
    """Return what was seen as the table has it, of one word or of a person's sentence."""
    if seen := matching.symptom_of_word(words):
        return seen
    said = sentences(words)
    if seen := matching.symptoms(said, {each.id for each in losses.signs_in_words("", said)}):
        return seen
    known = ", ".join(sorted(table().symptoms))
    what = f"--symptom {words!r:.80} names nothing that faults are known by ({known})"
    seen_as = "say one of these, or a sentence with the numbers"
    raise Stop(what, nearest(words.lower().replace("_", "-"), matching.symptoms_by_word(), otherwise=seen_as))
