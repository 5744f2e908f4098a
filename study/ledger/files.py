"""Reads claims files: TOML in, claims out. An error names the file and the line."""

import re
from datetime import date
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, ValidationError

from study.errors import Stop
from study.io import files
from study.io import parsing as texts
from study.ledger.arguments import STRICT
from study.ledger.model import Check, Claim, FindingOf, Reference, Settle, Source
from study.spec.validation import nearest, sentence

FOLDER = Path(__file__).resolve().parent / "claims"
SOURCES = "sources.toml"
MAX_BYTES = 4 * 2**20  # the longest claims file of this study has 90 kB
Form = TypeVar("Form", bound=BaseModel)


class Head(BaseModel):
    """What a claims file says of its document."""

    model_config = STRICT

    document: str
    title: str
    fixed: date
    text: str | None = None
    read: str | None = None
    tolerances: dict[Annotated[float, Field(strict=False)], str] = {}
    source: list[Source] = []  # its own sources, besides those that all files share
    claim: list[dict]


def read_form(path: Path, form: type[Form]) -> tuple[Form, str]:
    """A TOML file in this form, and its text."""
    try:
        content = files.read(path, MAX_BYTES)
        return form.model_validate(texts.from_toml(content)), content.decode().removeprefix("\ufeff")
    except OSError as error:
        what = f"the claims file {path} cannot be read ({files.why(error)})"
        raise Stop(what, "name a claims file, or a folder of claims files") from None
    except ValidationError as error:
        what = f"{path.name}: {sentence(error, form.model_fields)}"
    except ValueError as error:
        what = f"{path.name} is not valid TOML (a table in braces must be on a single line): {files.why(error)}"
    raise Stop(what, "correct the file")


def read_all(folder: Path = FOLDER) -> list[Claim]:
    """The claims of one file, or of all files of a folder: documents, then papers, then others. Ids are unique."""
    paths = [path for path in sorted(folder.glob("*.toml")) if path.name != SOURCES] if folder.is_dir() else [folder]
    claims = [claim for path in paths for claim in read(path)]
    first: dict[str, Claim] = {}
    for claim in claims:
        if (other := first.setdefault(claim.id, claim)) is not claim:
            raise Stop(f"{claim.at}: the id {claim.id} is taken, at {other.at}", "give the claim another id")
    return [_with_references(claim, first) for claim in sorted(claims, key=_place)]


def _place(claim: Claim) -> tuple:
    """Sorts documents (000) before papers (P1), and those before all others."""
    name = claim.document
    return not name.isdigit(), not name[1:].isdigit(), name


def _with_references(claim: Claim, known: dict[str, Claim]) -> Claim:
    """The claim, with the checks that its values refer to."""
    also = tuple(_with_reference(check, claim, known) for check in claim.also)
    weaker = claim.until_tested
    if weaker:
        weaker = _with_reference(weaker, claim, known).model_copy(update={"also": also})
    return _with_reference(claim, claim, known).model_copy(update={"also": also, "until_tested": weaker})


def _with_reference(check: Form, claim: Claim, known: dict[str, Claim]) -> Form:
    if not isinstance(check.value, FindingOf):
        return check
    name, number = check.value.finding_of, check.value.also
    if name not in known:
        raise Stop(f"{claim.at}, claim {claim.id}: value refers to {name}, which is no claim", nearest(name, known))
    if (number or 0) > (count := len(known[name].also)):
        what = f"{claim.at}, claim {claim.id}: value refers to check {number} of {name}, which has {count}"
        raise Stop(what, "count its [[claim.also]] tables from 1")
    return check.model_copy(update={"value": Reference(name, number, known[name])})


def read(path: Path) -> list[Claim]:
    """The claims of one file. Their values may refer to claims of other files."""
    head, text = read_form(path, Head)
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if line.strip().startswith("[[claim]]")]
    if len(starts) != len(head.claim):
        raise Stop(
            f"{path.name} has claims that are not written as [[claim]] tables", "write each claim as a [[claim]] table"
        )
    claims, about = [], head.model_dump(exclude={"claim", "tolerances", "source"})
    context = {"tolerances": head.tolerances} if head.text or head.read else None
    for start, end, table in zip(starts, [*starts[1:], len(lines)], head.claim, strict=True):
        try:
            at = {"at": f"{path.name}, line {start + 1}"}
            if head.source:
                _give(table, head.source)
            claims.append(Claim.model_validate(table | about | at, context=context))
        except ValidationError as error:
            location = error.errors()[0]["loc"]
            form = Settle if "settle" in location else Check if "also" in location else Claim
            name = f"claim {table['id']}" if "id" in table else "a claim without an id"
            what = sentence(error, {field.alias or key for key, field in form.model_fields.items()})
            line = _line_of(location, lines, start, end) + 1
            raise Stop(f"{path.name}, line {line}, {name}: {what}", "correct the file") from None
    return claims


def _give(table: dict, sources: list[Source]) -> None:
    """Give a file's own sources to its checks that cite sources."""
    for check in (table, table.get("until_tested", {}), *table.get("also", [])):
        if check.get("check") in ("cited", "searched") and isinstance(check.get("with"), dict):
            check["with"]["own"] = [source.model_dump() for source in sources]


def _line_of(location: tuple, lines: list[str], start: int, end: int) -> int:
    """The line of a key; of the head of its table if the key is missing."""
    also = [number for number in range(start, end) if lines[number].strip().startswith("[[claim.also]]")]
    tables, table = [start, *also, end], 0
    if location[:1] == ("also",) and len(location) > 2 and location[1] < len(also):
        table, location = location[1] + 1, location[2:]
    key = re.escape(str(location[0])) if location else "no key"
    keys = re.compile(rf"\s*({key}\s*=|\[[\w.]+\.{key}\])")
    return next((number for number in range(*tables[table : table + 2]) if keys.match(lines[number])), tables[table])
