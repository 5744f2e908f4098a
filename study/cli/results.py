"""`study claims` and `study report`: published claims with what was found, and the web pages."""

import sys
from pathlib import Path

import tyro

from study.core.errors import Stop
from study.core.options import AsJson
from study.core.text import number_of, say, say_wrapped, short, show
from study.ledger import texts
from study.ledger.texts import Claim, Fault
from study.records.runs import load


def claims(
    claim: tyro.conf.Positional[tuple[str, ...]] = (),
    /,
    *,
    runs: tuple[Path, ...] = (),
    as_json: AsJson = False,
) -> list[dict] | None:
    """Count how many published claims hold, or show everything about some of them.

    Args:
        claim: Ids of claims, such as S000-20 (case does not matter); a document, such as 002; or words that a claim
            contains, such as 60 GB.
        runs: Folders that contain runs, at any depth: compare what they give with the evidence of the claims.
        as_json: Print everything as JSON.
    """
    chosen = texts.named(claim) if claim else texts.claims()
    if as_json:
        return [each.model_dump(mode="json", by_alias=True) for each in chosen]
    if runs:
        _compare([each for each in chosen if isinstance(each, Claim)], runs, in_full=bool(claim))
    elif not claim:
        _summary()
    elif len(chosen) == 1 or claim[0].lower() == chosen[0].id.lower():
        for each in chosen:
            say_wrapped(*(of_claim(each) if isinstance(each, Claim) else of_fault(each)), "", indent="    ")
    else:
        say_wrapped(*[f"{each.id} {each.outcome}. {each.found}" for each in chosen], "", indent="    ")
    return None


def _summary() -> None:
    """Show the count of verdicts, the documents, and the central claims."""
    say_wrapped(texts.in_words(texts.claims()), "")
    show(texts.by_document())
    say("", "What each document stands for (study claims ID has the rest):", "")
    columns = ("id", "question", "verdict", "certainty")
    show([{name: getattr(each, name) for name in columns} for each in texts.claims() if each.central])
    say("", f"Apart from these: {len(texts.faults())} faults of libraries (study claims faults).")


def of_claim(claim: Claim) -> list[str]:
    """Return everything about a claim."""
    certainty = f" ({claim.certainty} certainty: {claim.because})" if claim.certainty else ""
    return [
        f"{claim.id} {claim.outcome}.{certainty}",
        f"“{claim.quote}” ({claim.where})",
        claim.found,
        f"What would change it: {claim.changes}",
        *(["It counts nowhere: its evidence could not have come out otherwise."] if claim.idle else []),
        *(f"evidence: {each}" for each in claim.evidence),
    ]


def of_fault(fault: Fault) -> list[str]:
    """Return everything about a fault of a library."""
    return [
        f"{fault.id} {fault.outcome} ({fault.certainty} certainty: {fault.because})",
        fault.what,
        fault.found,
        f"evidence: python reproductions/{fault.script}.py finds {short(fault.value)}",
        *([f"thread: {fault.thread}"] if fault.thread else []),
    ]


def _compare(chosen: list[Claim], folders: tuple[Path, ...], in_full: bool) -> None:
    """Show whether some runs give the numbers that claims name. Otherwise only those that differ."""
    loaded = load(folders, every_folder_has_runs=True)
    rows = texts.compared(chosen, loaded.counting)
    counts = {word: sum(row.answer == word for row in rows) for word in texts.ANSWERS}
    agree, differ, lack = (counts[word] for word in texts.ANSWERS)
    yours = number_of(len(loaded), "runs")
    answer = f"Your {yours} agree with {agree} numbers of published claims, and differ from {differ};"
    say_wrapped(f"{answer} {lack} need experiments that you have not run.", "")
    show(
        [
            {
                "claim": row.claim,
                "evidence": row.evidence.what,
                "committed": row.evidence.value,
                "yours": short(row.value),
            }
            | {"answer": row.answer}
            for row in rows
            if in_full or row.answer == texts.DIFFERS
        ]
    )


def report(*, runs: tuple[Path, ...] = (), out: Path = Path("reports/build")) -> None:
    """Write the report about some runs: web pages that open from disk. This executes the notebooks.

    Args:
        runs: Folders that contain runs, at any depth.
        out: The folder for the pages. An earlier report in it is replaced.
    """
    if not runs:
        raise Stop("study report needs --runs", "give folders that contain runs")
    from study.report.site import build

    sys.exit(1 if build(list(runs), out) else 0)
