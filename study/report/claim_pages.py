"""The page of all claims."""

import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from study.ledger import words
from study.ledger.judging import Verdict
from study.ledger.verdict import BASES, VERDICTS
from study.records.privacy import redact
from study.report.templating import write_page

DOCUMENTS = Path(__file__).with_name("documents.toml")
NOTHING = "nothing yet"  # what a claim rests on that was not tested


@dataclass(frozen=True)
class Document:
    """A document with claims, as a reader knows it."""

    id: str
    name: str
    title: str
    authors: str = ""
    address: str | None = None
    links: dict[str, str] = field(default_factory=dict)  # of several works, by name
    number_of: dict[str, int] = field(default_factory=dict)  # of its claims, by verdict


def label(document: str) -> str:
    """A document in a figure: `P1: ZeRO paper`. An id that is a word, such as `pages`, is left out."""
    name = tomllib.loads(DOCUMENTS.read_text()).get(document, {}).get("name", document)
    return name if document.islower() or name == document else f"{document}: {name.removeprefix('The ')}"


def documents(verdicts: Iterable[Verdict]) -> list[Document]:
    """Return the documents of some claims, in the order of the claims. An unknown document has only its title."""
    known = tomllib.loads(DOCUMENTS.read_text())
    titles: dict[str, str] = {}
    counts: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        titles.setdefault(verdict.claim.document, verdict.claim.title)
        counts.setdefault(verdict.claim.document, Counter())[verdict.verdict] += 1
    entries = []
    for name, title in titles.items():
        about = {"name": title, "title": title} | known.get(name, {})
        number_of = {word: counts[name][word] for word in VERDICTS if counts[name][word]}
        entries.append(Document(name, **about, number_of=number_of))
    return entries


def write(verdicts: list[Verdict], path: Path, titles: dict[str, str]) -> None:
    """Write the page of all claims, with a place for each: `claims.html#S000-13`."""
    known = documents(verdicts)
    of_document = {
        document.id: [
            (each, words.plainly(each), redact("\n".join(words.lines(each))))
            for each in sorted(verdicts, key=_number)
            if each.claim.document == document.id
        ]
        for document in known
    }
    choices = [  # what the list is filtered by: a name, its label, and the possible values in words
        ("document", "Document", {document.id: document.name for document in known}),
        ("verdict", "Verdict", {word: word for word in VERDICTS}),
        ("basis", "Rests on", {basis: basis for basis in (*BASES, NOTHING)}),
    ]
    values = {"bases": words.WHAT_A_BASIS_IS, "nothing": NOTHING, "choices": choices, "count": len(verdicts)}
    write_page(path, "claims.html", titles=titles, here="claims", documents=known, of_document=of_document, **values)


def _number(verdict: Verdict) -> list[int]:
    """Return the numbers in a claim's id, by which the claims of a document are ordered."""
    return [int(number) for number in re.findall(r"\d+", verdict.claim.id)]
