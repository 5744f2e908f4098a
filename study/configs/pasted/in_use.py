"""Fit a remedy to a text: without what is in use, was tried, or cannot be on its machine, of in_use.toml.

A remedy is clauses between semicolons, of items between commas or "or": each item is kept or left out.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import with_config

from study.configs.pasted.read import Pasted
from study.configs.pasted.words import only
from study.core.tables import NO_OTHER_KEYS, Regex, read_table

TRAINERS = ("SFT", "DPO", "GRPO", "KTO", "PPO", "Reward", "RLOO", "ORPO", "CPO")  # of TRL
IN_USE = Path(__file__).with_name("in_use.toml")
FLAGS = re.IGNORECASE | re.ASCII
JOINT = r"(?:, (?:or|and) |, |(?<!\d) (?:or|and) | (?:or|and) (?!\d))"  # not "stages 1 and 2"
BRACKETS = r"\((?:[^()]|\([^()]*\))*\)"
ASIDE = re.compile(rf" {BRACKETS}")
WHOLE = rf"`[^`]*`|-c '[^']*'|{BRACKETS}"  # whose commas separate nothing
CLAUSE = re.compile(rf"(?:^|(?<=; ))(?:{WHOLE}|(?!; ).)+")
ITEM = re.compile(rf"(?:{JOINT})?(?:{WHOLE}|(?!{JOINT}).)+")
FIRST = re.compile(rf"(^|: ){JOINT}")  # before the first item of a list, where the one before it is left out
NOTHING_BEHIND = re.compile(rf"(?:^|{JOINT})(?:(?!{JOINT}).)*: $|^(?:else )?if\b[^,:]*$")  # a colon or a condition
SETTING = re.compile(r"(?<![\w.])(\w+_\w+)(?:=|: | to )[\"']?(\w+)")
REFUSED = re.compile(r"\b(?:unset|not|leave|remove|without)\b")  # what is set is the mistake
# Messages advise ("try setting ..."), and people ask; who tried it says so.
ADVICE = re.compile(
    r"(?i)\b(?:try|can|could|may|please|should|must|consider|(?:need|want) to|recommend\w*|by setting|pass(?:ing)?)\b"
    r"(?![\s\S]*\b(?:(?:i|we) (?:use|set|have|am|are)|tried|already)\b)"
)
SENTENCE = re.compile(r"[.;!?]\s|\n\s*[-*>$\n]")
NEAR = 100  # characters before
NOTHING_LEFT = "what usually helps is in use here already: paste the whole Traceback and the list of `pip freeze`"


@dataclass(frozen=True)
@with_config(NO_OTHER_KEYS)
class InUse:
    """A row of the table. The fields are explained there."""

    advice: Regex
    text: Regex = ""
    said: dict[str, list] = field(default_factory=dict)
    instead: str = ""

    def fits(self, pasted: Pasted) -> bool:
        """Whether a text says it."""
        is_said = any(pasted.said.get(condition) in values for condition, values in self.said.items())
        return is_said or bool(self.text and _is_in_use(self.text, pasted.text))


@functools.cache
def rows() -> dict[str, InUse]:
    """Return the rows of in_use.toml."""
    return read_table(IN_USE, dict[str, InUse], InUse)


def advised(remedy: str, pasted: Pasted) -> str:
    """Return a remedy without that of which the text says that it is in use, with the config class of its trainer."""
    if "SFTConfig" in remedy:
        trainer = only(
            {each for each in TRAINERS if re.search(rf"(?i)\b(?:trl {each}|{each}_?(?:trainer|config))\b", pasted.text)}
        )
        remedy = remedy.replace("SFTConfig", f"{trainer or 'SFT'}Config")
    fitting = [row for row in rows().values() if row.fits(pasted)]
    left = _left(remedy, fitting, pasted.text)
    if left == remedy:
        return remedy
    instead = [row.instead for row in fitting if row.instead and re.search(row.advice, remedy, FLAGS)]
    return "; ".join(filter(None, [*instead, re.sub("^(?:else|or|and) ", "", left)])) or NOTHING_LEFT


def _left(remedy: str, fitting: Sequence[InUse], text: str) -> str:
    """Return a remedy, or an aside of one, without the items that are in use."""
    clauses = []
    for clause in CLAUSE.findall(remedy):
        kept = "".join(_kept(item, fitting, text) for item in ITEM.findall(clause))
        clauses.append(kept if kept == clause else NOTHING_BEHIND.sub("", FIRST.sub(r"\1", kept)))
    return "; ".join(filter(None, clauses))


def _kept(item: str, fitting: Sequence[InUse], text: str) -> str:
    """Return an item of a remedy, with the joint before it; of one that is in use, what stands before a colon."""
    said = ASIDE.sub("", item)
    used = [match for row in fitting if (match := re.search(row.advice, said, FLAGS))]
    settings = [*SETTING.finditer(said)]
    if all(_is_set(match[1], match[2], text) for match in settings):
        used += settings
    if not used or REFUSED.search(said):
        return ASIDE.sub(lambda aside: f" ({_left(aside[0][2:-1], fitting, text)})", item).replace(" ()", "")
    before, colon, _ = said[: used[0].start()].rpartition(": ")
    return before + colon


def _is_set(key: str, value: str, text: str) -> bool:
    """Whether a text has a setting with this value."""
    return _is_in_use(rf"\b{key}[\"']?(?:\s*(?:[:=]|\.{{3,}})\s*| (?:to )?)[\"']?{value}\b", text)


def _is_in_use(pattern: str, text: str) -> bool:
    """Whether a text has something, and not as the advice of a message or as a question."""
    for match in re.finditer(pattern, text, FLAGS):
        sentence = SENTENCE.split(text[max(match.start() - NEAR, 0) : match.start()])[-1]
        if not ADVICE.search(sentence):
            return True
    return False
