"""Checks that rest on a source: what it says, with its own sentence; that none says it; or what others measured."""

import functools
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel

from study.errors import Stop
from study.io import validation
from study.io.load import load
from study.io.numbers import number_of, short
from study.ledger.arguments import STRICT, as_list
from study.ledger.verdict import Finding
from study.predictor.outside import published as others

FOLDER = Path(__file__).resolve().parent / "claims"
SOURCES = "sources.toml"
MAX_BYTES = 4 * 2**20  # the longest claims file of this study has 90 kB
LONGEST_QUOTE = 40  # words
REMEDY = "correct the file (in TOML, a table in braces must be on a single line)"
Form = TypeVar("Form", bound=BaseModel)
Patterns = dict[str, str]  # a regular expression for each of some columns


def read_form(path: Path, form: type[Form]) -> Form:
    """Return a TOML file in this form."""
    about = {"what": "valid", "remedy": REMEDY, "missing": "name a claims file, or a folder of claims files"}
    return load(path, form, most_bytes=MAX_BYTES, links=True, known=form.model_fields, **about)


class Source(BaseModel):
    """What claims may cite, and how it was read."""

    model_config = STRICT

    id: str
    title: str
    address: str
    read: Literal["original", "translation", "abstract", "source code", "documentation"]


class Sources(BaseModel):
    model_config = STRICT

    source: list[Source] = []


def sources() -> Mapping[str, Source]:
    """Return the sources that claims may cite, by id."""
    return _sources(FOLDER / SOURCES)


@functools.cache  # a report asks for it more than a thousand times
def _sources(path: Path) -> Mapping[str, Source]:
    if not path.exists():
        return {}
    entries = read_form(path, Sources).source
    for name, times in Counter(entry.id for entry in entries).items():
        if times > 1:
            raise Stop(f"{SOURCES}, source {name} appears twice", "give each source its own id")
    return {entry.id: entry for entry in entries}


def _short(sentence: str) -> str:
    count = len([word for word in sentence.split() if word not in ("...", "|")])
    if not 0 < count <= LONGEST_QUOTE:
        raise ValueError(f"must have 1 to {LONGEST_QUOTE} words (got {count})")
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
    own: list[dict] | None = None,
) -> Finding:
    """Return what a source says, as somebody read it: a value, or whether it agrees.

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


def searched(
    *,
    looked_in: list[str],
    where: str,
    source: str,
    nearest: Sentence,
    own: list[dict] | None = None,
) -> Finding:
    """Find nothing, because none of the sources read says it. `nearest` is the nearest sentence of `source`."""
    working = f"no source says this; read: {_read(looked_in, own)} ({where}); the nearest sentence is of {source}"
    missing = "a source that says this, or a measurement"
    _read((source,), own)
    return Finding(None, working, evidence=tuple(looked_in), missing=missing, sentence=nearest)


def _read(ids: Iterable[str], own: list[dict] | None) -> str:
    """Return the sources in words, each with how it was read."""
    known = {**sources(), **{each["id"]: Source(**each) for each in own or ()}}
    words = []
    for name in ids:
        if name not in known:
            remedy = f"add it there, or to the claims file; {validation.nearest(name, known)}"
            raise Stop(f"{name!r} is not a source in {SOURCES}", remedy)
        words.append(f"{name} ({known[name].read})")
    return ", ".join(words)


@functools.cache
def _comparable() -> list[list[tuple[others.Row, float]]]:
    """Return the published rows with a known speed: those of one source, model, machine and row length together."""
    groups = defaultdict(list)
    for row in others.known():
        if speed := row.rows_per_s:
            groups[row.source, row.model, row.gpu, row.n_gpus, row.seq].append((row, speed))
    return [*groups.values()]


def ratios_of_speed(numerator: Patterns, denominator: Patterns) -> list[tuple[str, float]]:
    """Return the source of each comparable pair of rows, and the speed of the first row over that of the second."""
    return [
        (row.source, speed / other_speed)
        for group in _comparable()
        for (row, speed), (other, other_speed) in itertools.product(group, repeat=2)
        if _matches(row, numerator) and _matches(other, denominator)
    ]


def _matches(row: others.Row, patterns: Patterns) -> bool:
    for name in patterns:
        if name not in others.Row.model_fields:
            what = f"{name!r} is not a column of measurements.csv"
            raise Stop(what, validation.nearest(name, others.Row.model_fields))
    return all(re.search(pattern, str(getattr(row, name))) for name, pattern in patterns.items())


def published(*, of: Patterns, to: Patterns, where: Patterns = {}) -> Finding:  # noqa: B006
    """The speed of published trainings over that of others, of one source, model, machine and row length.

    Each side gives regular expressions for columns of reports/outside/measurements.csv. Speed is rows a second and GPU,
    so the batches may differ. The interval is that of all pairs.
    """
    pairs = ratios_of_speed(where | of, where | to)
    if not pairs:
        return Finding(None, "no published pair", missing="published trainings of both sides on one machine")
    found = [ratio for _, ratio in pairs]
    sources = tuple(dict.fromkeys(source for source, _ in pairs))
    span = (min(found), max(found))
    counted = f"{number_of(len(pairs), 'pairs')} published by {number_of(len(sources), 'sources')}"
    ratios = " to ".join(dict.fromkeys(map(short, span)))
    return Finding(median(found), f"{counted}: {ratios} times the speed", span, evidence=sources)
