"""A page for each claim at a permanent address, and the list of all of them."""

import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from study.io.files import safe_join
from study.ledger import committed, words
from study.ledger.certainty import certainty
from study.ledger.citations import sources
from study.ledger.judging import Verdict
from study.ledger.ledger import otherwise
from study.ledger.model import Check
from study.ledger.verdict import BASES, MEASURED, VERDICTS, VIRTUAL
from study.records.runs import Run
from study.report.templating import write_page
from study.spec.arms import ROOT

DOCUMENTS = Path(__file__).with_name("documents.toml")
GUIDE = ROOT / "CONTRIBUTING.md"  # no part of an installed package
OBJECTING = "## How to object to a verdict\n"
INSTRUMENTS = "version of the instruments"  # in a difference that is none of the claim's conditions
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


def write(verdicts: list[Verdict], run_slugs: dict[Run, str], out: Path, titles: dict[str, str]) -> None:
    """Write the list and the pages of all claims below `out`. `run_slugs` has the runs that have a page."""
    runs = {run.name: (run, slug) for run, slug in reversed(run_slugs.items())}
    of_id = {document.id: document for document in documents(verdicts)}
    verdicts = [each for name in of_id for each in sorted(verdicts, key=_number) if each.claim.document == name]
    text = objecting()
    common = {"up": "../", "titles": titles, "objecting": "objecting.html" if text else ""}
    (out / "claims").mkdir()
    if text:
        write_page(out / "claims" / "objecting.html", "objecting.html", **common, text=text, here="claim")
    for before, verdict, after in zip([None, *verdicts], verdicts, [*verdicts[1:], None], strict=False):
        values = {"verdict": verdict, "document": of_id[verdict.claim.document], "neighbours": (before, after)}
        values |= page(verdict) | {"evidence": evidence(verdict, runs), "here": "claim"}
        values["also"] = [
            {"verdict": other, "evidence": evidence(other, runs), "pairs": _result(check, other)}
            for check, other in zip(verdict.claim.also, verdict.also, strict=True)
        ]
        write_page(safe_join(out / "claims", f"{verdict.claim.id}.html"), "claim.html", **common, **values)
    choices = [  # what the list is filtered by: a name, its label, and the possible values in words
        ("document", "Document", {document.id: document.name for document in of_id.values()}),
        ("verdict", "Verdict", {word: word for word in VERDICTS}),
        ("basis", "Rests on", {basis: basis for basis in (*BASES, NOTHING)}),
    ]
    about = {"bases": words.WHAT_A_BASIS_IS, "nothing": NOTHING, "choices": choices, "here": "claims/index"}
    rows = [(verdict, words.plainly(verdict)) for verdict in verdicts]
    page_of_all = out / "claims" / "index.html"
    write_page(page_of_all, "claims.html", **common, rows=rows, documents=list(of_id.values()), **about)


def _number(verdict: Verdict) -> list[int]:
    """Return the numbers in a claim's id, by which the claims of a document are ordered."""
    return [int(number) for number in re.findall(r"\d+", verdict.claim.id)]


def objecting() -> str:
    """Return how to object to a verdict, as the guide for contributors says it. Empty without that guide."""
    text = GUIDE.read_text() if GUIDE.exists() else ""
    return text.partition(OBJECTING)[2].partition("\n## ")[0]


def page(verdict: Verdict) -> dict:
    """Return what the page of a claim says, besides its evidence: texts by their labels."""
    claim = verdict.claim
    left_open = {name: values for name, values in claim.unsaid.items() if name not in words.INTERNAL}
    names = {name: words.NAMES.get(name, name.replace("_", " ")) for name in left_open}
    details = {
        "Claimed": words.claimed_in_full(verdict),
        "Found": words.found_words(verdict, claim.unit),
        "Right in releases": committed.ranges().get(claim.id, ""),
        "Rests on": words.basis_words(verdict),
        "Certainty": str(certainty(verdict) or ""),
        "Open because": "; ".join(filter(None, (verdict.open_because, verdict.holding))),
        "Not counted": words.not_counted_words(verdict),
        "Check": claim.check,
        "Conditions": words.conditions_words(claim),
        "The document leaves open": "; ".join(
            f"{names[each]}: {words.values_words(left_open[each], each)}" for each in names
        ),
        "Holds with": _cases(verdict.holds_under),
        "Fails with": _cases(verdict.fails_under),
        "Working": words.readable(verdict.working),
        "How we read the claim": " ".join((claim.reading or "").split()),
        "The claims of this error count once": claim.contradiction,
    }
    changed_by = otherwise(verdict)
    if verdict.holds_under or verdict.fails_under:
        changed_by = f"knowing what the document leaves open: {', '.join(names.values()) or words.READING}"
    written = {"Where": " ".join(claim.where.split()), "What we read": " ".join((claim.read or "").split())}
    return {
        "sentence": words.plainly(verdict),
        "written": written,
        "found": details,
        "differs": [words for words in verdict.differs if INSTRUMENTS not in words],
        "instruments": "; ".join(words for words in verdict.differs if INSTRUMENTS in words),
        "changed_by": words.readable(changed_by),
        "missing": words.readable(verdict.missing) if verdict.missing != otherwise(verdict) else "",
    }


def _result(check: Check, verdict: Verdict) -> dict[str, str]:
    text = words.found_words(verdict, check.unit)
    return {"Claimed": words.claimed_words(check, verdict), "Found": text, "Working": words.readable(verdict.working)}


def _cases(cases: tuple[str, ...]) -> str:
    return words.readable("; ".join(case for case in cases if case.partition(" ")[0] not in words.INTERNAL))


def evidence(verdict: Verdict, runs: dict[str, tuple[Run, str]]) -> dict:
    """Return what a verdict rests on: runs with their pages, sources with their addresses, scripts by their names.

    `runs` are the run and its page's name, by the run's name. A run in other conditions is shown, and does not count.
    """
    known = sources()
    of_runs = [runs[name] for name in verdict.evidence if name in runs and verdict.basis in (MEASURED, VIRTUAL)]
    of_sources = [known[name] for name in verdict.evidence if name in known]
    shown = {run.name for run, _ in of_runs} | known.keys()
    scripts = {path.stem for path in (ROOT / "reproductions").glob("*.py")}
    others = [{"name": name, "is_script": name in scripts} for name in verdict.evidence if name not in shown]
    return {"runs": of_runs, "sources": of_sources, "others": others, "quote": verdict.sentence}


def used_by(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    """Return the verdicts that rest on a run, by the run's name."""
    resting: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        for name in verdict.evidence if verdict.rests_on in (MEASURED, VIRTUAL) else ():
            resting.setdefault(name, []).append(verdict)
    return resting
