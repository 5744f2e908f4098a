"""What a person's words mean beside a setting, a number or a message: situations.toml, read into types."""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version
from pydantic import with_config

from study.configs.pasted.read import Pasted
from study.configs.pasted.tracebacks import LONGEST, Seen, Sure, line_at
from study.configs.pasted.words import meets
from study.core.tables import NO_OTHER_KEYS, Evidence, Regex, read_table
from study.known.faults import named

SITUATIONS = Path(__file__).with_name("situations.toml")


@dataclass(frozen=True)
@with_config(NO_OTHER_KEYS)
class Situation:
    """A row of the table. The fields are explained there."""

    sentence: str
    remedy: str
    sure: Sure
    evidence: Evidence
    who: str = ""
    words: tuple[str, ...] = ()
    needs: Regex = ""
    without: Regex = "(?!)"
    symptoms: tuple[str, ...] = ()
    when: dict[str, list] = field(default_factory=dict)
    works: tuple[str, ...] = ()  # ways of contrasts.py
    fault: str = ""


@functools.cache
def situations() -> dict[str, Situation]:
    """Return the rows of situations.toml."""
    return read_table(SITUATIONS, dict[str, Situation], Situation)


def fitting(pasted: Pasted, symptoms: set[str]) -> list[Seen]:
    """Return the situations that fit, the likely ones alone if there are any. What makes steps slow adds up.

    `symptoms` are those of symptoms.toml, and ids of signs.
    """
    fits = [*_fits(pasted, symptoms)]
    if all(each.sure != "likely" for each in fits):
        return fits
    return [each for each in fits if each.sure == "likely" or "slow" in situations()[each.id].symptoms]


def _fits(pasted: Pasted, symptoms: set[str]) -> Iterator[Seen]:
    """Yield each situation that fits, with the line that shows it."""
    for id, each in situations().items():
        if not _may_fit(each, pasted, symptoms):
            continue
        line = _line(each, pasted)
        if line is None:
            continue
        sentence = each.sentence.replace("{stage}", str(pasted.said.get("stage", "1 or 2")))
        line = " ".join(line.split())[:LONGEST]
        yield Seen(id, sentence, each.remedy, each.sure, each.evidence, who=each.who, line=line)


def _may_fit(situation: Situation, pasted: Pasted, symptoms: set[str]) -> bool:
    """Whether its symptoms were seen, and the text says its settings."""
    if situation.symptoms and symptoms.isdisjoint(situation.symptoms):
        return False
    if situation.works and pasted.works.isdisjoint(situation.works):
        return False
    if situation.fault and is_without(situation.fault, pasted):
        return False
    return all(pasted.said.get(condition) in values for condition, values in situation.when.items())


def is_without(fault: str, pasted: Pasted) -> bool:
    """Whether the release that a text names is known not to have a fault of its library."""
    release = pasted.releases.get(named(fault).package)
    return isinstance(release, Version) and named(fault).has(release) is False


def _line(situation: Situation, pasted: Pasted) -> str | None:
    """Return what in a text shows a situation. None: nothing does."""
    flags = re.IGNORECASE | re.ASCII  # a Chinese character beside a word ends it
    needed = re.search(situation.needs, pasted.text, flags)
    if needed is None or re.search(situation.without, pasted.text, flags):
        return None
    if situation.words:
        return meets(situation.words, pasted.question)
    return line_at(pasted.text, needed.start()) if situation.needs else ""
