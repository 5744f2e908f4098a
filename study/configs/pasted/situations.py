"""What a person's words mean where no message says it: situations.toml, read into types."""

import functools
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from study.configs.pasted import matching
from study.configs.pasted.read import Pasted
from study.configs.pasted.tracebacks import LONGEST, Seen, Sure, line_at
from study.configs.pasted.words import Sentence, meets, sentences

TABLE = Path(__file__).with_name("situations.toml")


@dataclass(frozen=True)
class Situation:
    """A row of the table. The fields are explained there."""

    sentence: str
    remedy: str
    sure: Sure
    evidence: str
    who: str = ""
    words: tuple[str, ...] = ()
    names: str = ""
    otherwise: bool = False
    needs: str = ""
    without: str = ""
    symptoms: tuple[str, ...] = ()
    unsaid: tuple[str, ...] = ()
    when: dict[str, list] = field(default_factory=dict)


@functools.cache
def situations() -> dict[str, Situation]:
    rows: dict[str, dict[str, Any]] = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {id: Situation(**row) for id, row in rows.items()}


def is_spare(id: str) -> bool:
    """Whether this is told only where nothing else is."""
    return id in situations() and situations()[id].otherwise


def fitting(pasted: Pasted, said: Sequence[Sentence], symptoms: set[str]) -> list[Seen]:
    """Return the situations that fit, the likely ones alone if there are any.

    `symptoms` are those of symptoms.toml, and ids of signs.
    """
    fits = [*_fits(pasted, said, symptoms)]
    return [each for each in fits if each.sure == "likely"] or fits


def _fits(pasted: Pasted, said: Sequence[Sentence], symptoms: set[str]) -> Iterator[Seen]:
    for id, each in situations().items():
        if each.symptoms and not symptoms & {*each.symptoms}:
            continue
        unsaid = {*each.unsaid}.difference(pasted.said)
        asked = {condition: values for condition, values in each.when.items() if condition not in unsaid}
        if not all(pasted.said.get(condition) in values for condition, values in asked.items()):
            continue
        line = meets(each.words, said)
        # What stands in two sentences may be two things. A symptom that a log shows has no sentence.
        together = matching.symptoms(sentences(line or ""), symptoms)
        is_apart = bool(line and each.symptoms and together.isdisjoint(each.symptoms))
        if line is None and each.names and (match := re.search(each.names, pasted.text, re.IGNORECASE)):
            line = line_at(pasted.text, match.start())
        if (not line and (each.words or each.names)) or not re.search(each.needs, pasted.text):
            continue
        if each.without and re.search(each.without, pasted.text, re.IGNORECASE):
            continue
        sentence = each.sentence.replace("{stage}", str(pasted.said.get("stage", "1 or 2")))
        sure = "possible" if unsaid or is_apart else each.sure
        line = " ".join((line or "").split())[:LONGEST]
        yield Seen(id, sentence, each.remedy, sure, each.evidence, who=each.who, line=line)
