"""What a person's words mean where no message says it: situations.toml, read into types."""

import functools
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from study.configs.pasted.read import Pasted
from study.configs.pasted.tracebacks import Seen, Sure

TABLE = Path(__file__).with_name("situations.toml")


@dataclass(frozen=True)
class Situation:
    """A row of the table. The fields are explained there."""

    sentence: str
    remedy: str
    sure: Sure
    evidence: str
    who: str = ""
    words: str = ""
    needs: str = ""  # must be in the text as well
    without: str = ""
    anywhere: bool = False
    symptoms: tuple[str, ...] = ()
    unsaid: tuple[str, ...] = ()
    when: dict[str, list] = field(default_factory=dict)


@functools.cache
def situations() -> dict[str, Situation]:
    rows: dict[str, dict[str, Any]] = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {id: Situation(**row) for id, row in rows.items()}


def fitting(pasted: Pasted, words: str, symptoms: set[str]) -> Iterator[Seen]:
    """Yield the situations that fit. `symptoms` are those of symptoms.toml, and ids of signs."""
    for id, each in situations().items():
        if each.symptoms and not symptoms & {*each.symptoms}:
            continue
        unsaid = {*each.unsaid}.difference(pasted.said)
        asked = {condition: values for condition, values in each.when.items() if condition not in unsaid}
        if not all(pasted.said.get(condition) in values for condition, values in asked.items()):
            continue
        text = pasted.text if each.anywhere else words
        match = re.search(each.words, text, re.IGNORECASE)
        if match is None or not re.search(each.needs, pasted.text):
            continue
        if each.without and re.search(each.without, pasted.text, re.IGNORECASE):
            continue
        sentence = each.sentence.replace("{stage}", str(pasted.said.get("stage", "1 or 2")))
        sure = "possible" if unsaid else each.sure
        line = " ".join(match[0].split())[:200]
        yield Seen(id, sentence, each.remedy, sure, each.evidence, who=each.who, line=line)
