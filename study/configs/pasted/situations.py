"""What a person's words mean beside a setting, a number or a message: situations.toml, read into types."""

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import with_config

from study.configs.pasted.read import Pasted
from study.configs.pasted.tracebacks import LONGEST, Seen, Sure, line_at
from study.configs.pasted.words import Sentence, meets
from study.core.tables import NO_OTHER_KEYS, Evidence, Regex, read_table

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


@functools.cache
def situations() -> dict[str, Situation]:
    return read_table(SITUATIONS, dict[str, Situation], Situation)


def fitting(pasted: Pasted, said: Sequence[Sentence], symptoms: set[str]) -> list[Seen]:
    """Return the situations that fit, the likely ones alone if there are any.

    `symptoms` are those of symptoms.toml, and ids of signs.
    """
    fits = [*_fits(pasted, said, symptoms)]
    return [each for each in fits if each.sure == "likely"] or fits


def _fits(pasted: Pasted, said: Sequence[Sentence], symptoms: set[str]) -> Iterator[Seen]:
    for id, each in situations().items():
        needed = re.search(each.needs, pasted.text, re.IGNORECASE)
        if needed is None or re.search(each.without, pasted.text, re.IGNORECASE):
            continue
        if each.symptoms and symptoms.isdisjoint(each.symptoms):
            continue
        if not all(pasted.said.get(condition) in values for condition, values in each.when.items()):
            continue
        line: str | None = ""
        if each.words:
            line = meets(each.words, said)
        elif each.needs:
            line = line_at(pasted.text, needed.start())
        if line is None:
            continue
        sentence = each.sentence.replace("{stage}", str(pasted.said.get("stage", "1 or 2")))
        line = " ".join(line.split())[:LONGEST]
        yield Seen(id, sentence, each.remedy, each.sure, each.evidence, who=each.who, line=line)
