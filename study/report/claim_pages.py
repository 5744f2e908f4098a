"""A page for each claim at a permanent address, and the list of all of them."""

import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from study.io.files import safe_join
from study.io.numbers import short
from study.ledger import words
from study.ledger.citations import sources
from study.ledger.ledger import Verdict, otherwise
from study.ledger.model import Check, Claim
from study.ledger.verdict import BASES, MEASURED, VERDICTS, VIRTUAL
from study.records.runs import Run
from study.report.templating import write_page
from study.spec.arms import PACKAGE

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
    found = []
    for name, title in titles.items():
        about = {"name": title, "title": title} | known.get(name, {})
        number_of = {word: counts[name][word] for word in VERDICTS if counts[name][word]}
        found.append(Document(name, **about, number_of=number_of))
    return found


def write(verdicts: list[Verdict], run_slugs: dict[Run, str], out: Path, titles: dict[str, str]) -> None:
    """Write the list and the pages of all claims below `out`. `run_slugs` has the runs that have a page."""
    runs = {run.name: (run, slug) for run, slug in reversed(run_slugs.items())}
    of_id = {document.id: document for document in documents(verdicts)}
    common = {"up": "../", "titles": titles}
    (out / "claims").mkdir()
    for before, verdict, after in zip([None, *verdicts], verdicts, [*verdicts[1:], None], strict=False):
        values = {"verdict": verdict, "document": of_id[verdict.claim.document], "neighbours": (before, after)}
        values |= page(verdict) | {"evidence": evidence(verdict, runs), "here": "claim"}
        further = zip(verdict.claim.also, verdict.also, strict=True)
        values["also"] = [_further(check, other, runs) for check, other in further]
        write_page(safe_join(out / "claims", f"{verdict.claim.id}.html"), "claim.html", **common, **values)
    known = list(of_id.values())
    rows = [(verdict, words.plainly(verdict)) for verdict in verdicts]
    about = {"bases": words.WHAT_A_BASIS_IS, "nothing": NOTHING, "choices": _choices(known)}
    page_of_all = out / "claims" / "index.html"
    write_page(page_of_all, "claims.html", **common, rows=rows, documents=known, **about, here="claim-list")


def _choices(known: list[Document]) -> list[tuple[str, str, dict[str, str]]]:
    """What the list is filtered by: a name, its label, and the possible values in words."""
    return [
        ("document", "Document", {document.id: document.name for document in known}),
        ("verdict", "Verdict", {word: word for word in VERDICTS}),
        ("basis", "Rests on", {basis: basis for basis in (*BASES, NOTHING)}),
    ]


def page(verdict: Verdict) -> dict:
    """What the page of a claim says, besides its evidence: lists of a label and a text."""
    claim = verdict.claim
    premise = "This is our premise. The authors at most imply it, so it is not counted among their claims."
    left_open = [f"{_name(each)}: {words.values_words(values)}" for each, values in _left_open(claim).items()]
    return {
        "sentence": words.plainly(verdict),
        "premise": premise if claim.premise else "",
        "written": _known(("Where", " ".join(claim.where.split())), ("What we read", claim.read and _flat(claim.read))),
        "found": _known(
            ("Claimed", words.claimed_in_full(verdict)),
            ("Found", words.found_words(verdict, claim.unit)),
            ("Rests on", words.basis_words(verdict)),
            ("Conditions", words.conditions_words(claim)),
            ("The document leaves open", "; ".join(left_open)),
            ("Holds with", _cases(verdict.holds_under)),
            ("Fails with", _cases(verdict.fails_under)),
            ("Working", verdict.working),
            ("How we read the claim", _flat(claim.reading or "")),
            ("The claims of this error count once", claim.contradiction),
        ),
        "differs": list(verdict.differs),
        "changed_by": _changed_by(verdict),
        "missing": verdict.missing if verdict.missing != otherwise(verdict) else "",
    }


def _left_open(claim: Claim) -> dict[str, list]:
    """What the document does not say, without arguments that only mean something in the code."""
    return {name: values for name, values in claim.unsaid.items() if name not in words.INTERNAL}


def _name(argument: str) -> str:
    return words.NAMES.get(argument, argument.replace("_", " "))


def _cases(cases: tuple[str, ...]) -> str:
    return "; ".join(case for case in cases if case.partition(" ")[0] not in words.INTERNAL)


def _changed_by(verdict: Verdict) -> str:
    if verdict.holds_under or verdict.fails_under:
        names = ", ".join(map(_name, _left_open(verdict.claim)))
        return f"knowing what the document leaves open: {names or words.READING}"
    return otherwise(verdict)


def _known(*pairs: tuple[str, str | None]) -> list[tuple[str, str]]:
    return [(label, text) for label, text in pairs if text]


def _flat(text: str) -> str:
    return " ".join(text.split())


def _further(check: Check, verdict: Verdict, runs: dict[str, tuple[Run, str]]) -> dict:
    """A further check: it is shown, but does not decide."""
    pairs = [("Claimed", words.claimed_words(check, verdict)), ("Found", words.found_words(verdict, check.unit))]
    about = {"verdict": verdict.verdict, "basis": verdict.basis, "evidence": evidence(verdict, runs)}
    return about | {"pairs": _known(*pairs, ("Working", verdict.working))}


def evidence(verdict: Verdict, runs: dict[str, tuple[Run, str]]) -> dict:
    """What a verdict rests on: rows of runs with their pages, sources with their addresses, scripts by their names.

    `runs` are the run and its page's name, by the run's name. A run in other conditions is shown, and does not count.
    """
    known, of_runs, of_sources, others = sources(), [], [], []
    for name in verdict.evidence:
        if name in runs and verdict.basis in (MEASURED, VIRTUAL):
            of_runs.append(_run(*runs[name]))
        elif name in known:
            of_sources.append(known[name])
        else:
            others.append({"name": name, "is_script": safe_join(PACKAGE / "reproductions", f"{name}.py").exists()})
    return {"runs": of_runs, "sources": of_sources, "others": others, "quote": verdict.sentence}


def _run(run: Run, slug: str) -> dict:
    ranks = (
        f"{run.ranks} {'virtual ' if run.virtual else ''}{'rank' if run.ranks == 1 else 'ranks'}" if run.ranks else ""
    )
    about = [run.arm, run.model, ranks, run.precision, f"seed {short(run.seed)}"]
    return {"slug": slug, "name": run.name, "about": ", ".join(filter(None, about)), "status": run.status}


def used_by(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    """The verdicts that rest on a run, by the run's name."""
    resting: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        for name in verdict.evidence if verdict.rests_on in (MEASURED, VIRTUAL) else ():
            resting.setdefault(name, []).append(verdict)
    return resting
