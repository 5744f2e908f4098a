"""Checks that rest on a source: what a source says, with its own sentence, or that no source says it."""

import functools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel

from study.errors import Stop
from study.ledger.arguments import STRICT, as_list
from study.ledger.files import FOLDER, SOURCES, read_form
from study.ledger.model import LONGEST_QUOTE, READ, Kind, Source
from study.ledger.verdict import Finding
from study.spec import validation


def _short(sentence: str) -> str:
    if not 0 < len(sentence.split()) <= LONGEST_QUOTE:
        raise ValueError(f"must have 1 to {LONGEST_QUOTE} words")
    return sentence


Sentence = Annotated[str, AfterValidator(_short)]


def cited(
    *,
    source: str | list[str],
    where: str,
    sentence: Sentence,
    says: str | None = None,
    value: float | str | bool | None = None,
    agrees: bool | None = None,
    own: list[dict] = (),
) -> Finding:
    """What a source says, as somebody read it: a value, or whether it agrees.

    `sentence` is quoted from the source: the caption of a figure, the row of a table, or the line of code.
    """
    ids = tuple(as_list(source))
    if (value is None) == (agrees is None):
        raise Stop("exactly one of value and agrees is needed", "give one of them")
    if agrees is not None and says is None:
        raise Stop("a cited check has agrees, but not what the source says", 'give says = "..."')
    working = f"{_read(ids, own)}, {where}: {says or value}"
    if agrees is None:
        return Finding(value, working, evidence=ids, sentence=sentence)
    return Finding(agrees, working, evidence=ids, instead_of=True, sentence=sentence)


def searched(*, looked_in: list[str], where: str, source: str, nearest: Sentence, own: list[dict] = ()) -> Finding:
    """Undecided, because none of the sources read says it. `nearest` is the nearest sentence, quoted from `source`."""
    working = f"no source says this; read: {_read(looked_in, own)} ({where}); the nearest sentence is of {source}"
    missing = "a source that says this, or a measurement"
    _read((source,), own)
    return Finding(None, working, evidence=tuple(looked_in), missing=missing, sentence=nearest)


def _read(ids: Iterable[str], own: list[dict]) -> str:
    """The sources, each with how it was read."""
    known = sources() | {each["id"]: Source(**each) for each in own}
    if unknown := [name for name in ids if name not in known]:
        remedy = f"add it there, or to the claims file; {validation.nearest(unknown[0], known)}"
        raise Stop(f"{unknown[0]!r} is not a source in {SOURCES}", remedy)
    return ", ".join(f"{name} ({known[name].read})" for name in ids)


class Sources(BaseModel):
    model_config = STRICT

    source: list[Source] = []


def sources() -> dict[str, Source]:
    """Return the sources that claims may cite, by id."""
    return _sources(FOLDER / SOURCES)


@functools.cache  # a report asks for it more than a thousand times
def _sources(path: Path) -> dict[str, Source]:
    if not path.exists():
        return {}
    entries = read_form(path, Sources)[0].source
    if twice := [name for name, times in Counter(entry.id for entry in entries).items() if times > 1]:
        raise Stop(f"{SOURCES}, source {twice[0]} appears twice", "give each source its own id")
    return {entry.id: entry for entry in entries}


KINDS = {check.__name__: Kind(READ, {"": check}) for check in (cited, searched)}
