"""Reads claims files: TOML in, claims out. An error names the file, and the line of the claim."""

from datetime import date, timedelta
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, ValidationError

from study.errors import Stop
from study.io import files as io_files
from study.io.validation import nearest, sentence
from study.ledger.arguments import STRICT
from study.ledger.citations import FOLDER, MAX_BYTES, SOURCES, Source, read_form
from study.ledger.model import Check, Claim, FindingOf, Reference, Settle
from study.records import store
from study.spec import arms

ACheck = TypeVar("ACheck", bound=Check)
CITING = ("cited", "searched")
FORMS: dict[str, type[BaseModel]] = {"settle": Settle, "also": Check}


class Head(BaseModel):
    """What a claims file says of its document."""

    model_config = STRICT

    document: str
    title: str
    fixed: date
    text: str | None = None
    read: str | None = None
    names: tuple[str, ...] = Field(default=(), strict=False)
    suspected: bool = False
    tolerances: dict[Annotated[float, Field(strict=False)], str] = {}
    source: list[Source] = []  # its own sources, besides those that all files share
    claim: list[dict]
    testable: int | None = None  # sentences, list items and rows of the document that could turn out false
    unjudged: tuple[str, ...] = Field(default=(), strict=False)  # those that no claim judges, verbatim
    counted: str = "not counted"  # how they were counted, or why they were not
    contact: str = "not asked yet"  # when and how its authors were asked
    response: str = "none"  # what they answered

    @property
    def judged(self) -> int | None:
        """Return how many of those sentences a claim judges; None if they were not counted."""
        return None if self.testable is None else self.testable - len(self.unjudged)


def read_all(folder: Path = FOLDER) -> list[Claim]:
    """Return the claims of one file, or of all files of a folder: documents, then papers, then others."""
    claims = [claim for path in (_paths(folder) if folder.is_dir() else [folder]) for claim in read(path)]
    first: dict[str, Claim] = {}
    for claim in claims:
        other = first.setdefault(claim.id, claim)
        if other is not claim:
            raise Stop(f"{claim.at}: the id {claim.id} is taken, at {other.at}", "give the claim another id")
    return [_with_references(claim, first) for claim in sorted(claims, key=_place)]


def coverage(folder: Path = FOLDER) -> list[Head]:
    """Return the heads of all files, in the order of the claims."""
    return sorted((read_form(path, Head) for path in _paths(folder)), key=_place)


def _paths(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.toml")) if path.name != SOURCES]


NO_REPORTS = "this installation has no committed evidence and no history: a clone of the repository has both"


def doubts(claims: list[Claim]) -> list[str]:
    """Return what to know about the claims of this study: that it has no reports, or wrong days."""
    return [NO_REPORTS] if arms.ROOT == arms.PACKAGE else wrong_days(claims)


def wrong_days(claims: list[Claim]) -> list[str]:
    """Return a sentence for each file of this study whose tolerances were not fixed on the day that it says."""
    known = store.first_days("*/claims/*.toml")
    if known is None:
        return ["the days on which tolerances were fixed cannot be compared without the history of the repository"]
    fixed = {claim.at.partition(",")[0]: claim.fixed for claim in claims}
    return [
        f"{name} says that its tolerances were fixed on {day}, but the history has it only since {known[name]}"
        for name, day in fixed.items()
        if name in known and day + timedelta(days=1) < known[name]  # a day may begin elsewhere
    ]


def _place(claim: Claim | Head) -> tuple:
    """Sort documents (000) before papers (P1), and those before all others."""
    name = claim.document
    return not name.isdigit(), not name[1:].isdigit(), name


def _with_references(claim: Claim, known: dict[str, Claim]) -> Claim:
    """Return the claim with the checks that its values refer to."""
    also = tuple(_with_reference(check, claim, known) for check in claim.also)
    weaker = claim.until_tested
    if weaker:
        weaker = _with_reference(weaker, claim, known).model_copy(update={"also": also})
    return _with_reference(claim, claim, known).model_copy(update={"also": also, "until_tested": weaker})


def _with_reference(check: ACheck, claim: Claim, known: dict[str, Claim]) -> ACheck:
    if not isinstance(check.value, FindingOf):
        return check
    name = check.value.finding_of
    number = check.value.also
    if name not in known:
        raise Stop(f"{claim.at}, claim {claim.id}: value refers to {name}, which is no claim", nearest(name, known))
    count = len(known[name].also)
    if number and number > count:
        what = f"{claim.at}, claim {claim.id}: value refers to check {number} of {name}, which has {count}"
        raise Stop(what, "count its [[claim.also]] tables from 1")
    return check.model_copy(update={"value": Reference(name, number, known[name])})


def read(path: Path) -> list[Claim]:
    """Return the claims of one file. Their values may refer to claims of other files."""
    head = read_form(path, Head)
    lines = io_files.read(path, MAX_BYTES).decode().splitlines()
    starts = [number for number, line in enumerate(lines, 1) if line.strip("\ufeff \t").startswith("[[claim]]")]
    if len(starts) != len(head.claim):
        what = f"{path.name} has claims that are not written as [[claim]] tables"
        raise Stop(what, "write each claim as a [[claim]] table")
    about = head.model_dump(include={"document", "title", "fixed", "text", "read", "names", "suspected"})
    context = {"tolerances": head.tolerances} if head.text or head.read else None
    claims = []
    for start, table in zip(starts, head.claim, strict=True):
        _give_sources(table, head.source)
        at = f"{path.name}, line {start}"
        try:
            claims.append(Claim.model_validate(table | about | {"at": at}, context=context))
        except ValidationError as error:
            location = error.errors()[0]["loc"]
            form = FORMS.get(str(location[0]) if location else "", Claim)
            known = [field.alias or key for key, field in form.model_fields.items()]
            name = f"claim {table['id']}" if "id" in table else "a claim without an id"
            raise Stop(f"{at}, {name}: {sentence(error, known)}", "correct the file") from None
    return claims


def _give_sources(table: dict, sources: list[Source]) -> None:
    """Give a file's own sources to its checks that cite sources."""
    for check in (table, table.get("until_tested", {}), *table.get("also", [])):
        if sources and check.get("check") in CITING and isinstance(check.get("with"), dict):
            check["with"]["own"] = [source.model_dump() for source in sources]
