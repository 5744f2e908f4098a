"""`study claims` and `study report`: verdicts on published claims, and the web pages."""

import difflib
import sys
import textwrap
from pathlib import Path

import tyro

from study.errors import Stop
from study.io.tables import say, show
from study.ledger import catalogue, evidence, files, ledger, words
from study.ledger.ledger import Verdict
from study.ledger.model import SORTS, Claim
from study.ledger.verdict import BASES, CONSISTENT, CONTRADICTS, INCONCLUSIVE, OWN, VERDICTS
from study.records.runs import load
from study.spec.options import AsJson
from study.spec.validation import nearest

SIGNS = {"equal": "", "at_least": "≥ ", "at_most": "≤ ", "above": "> ", "below": "< ", "up_to": "up to "}
APART = """\
What they rest on. Apart from them: what was held against the document's own numbers, where a contradiction counts \
once (consistent, contradictions, open), and premises, which are ours."""


def claims(
    claim: tyro.conf.Positional[tuple[str, ...]] = (),
    /,
    *,
    runs: tuple[Path, ...] = (),
    document: str | None = None,
    verdict: str | None = None,
    basis: str | None = None,
    kind: str | None = None,
    file: Path = files.FOLDER,
    verbose: bool = False,
    checks: bool = False,
    as_json: AsJson = False,
) -> list[dict] | None:
    """Count how many published claims hold and by what evidence, or show everything about some of them.

    Args:
        claim: Ids of claims, such as S000-13 (case does not matter). With --checks: names of checks.
        runs: Folders that contain runs, at any depth. Default: runs/, and the runs/ of every folder in reports/.
        document: Only claims of this document: 000 to 003, P1 to P5, O, pages or libraries.
        verdict: Only claims with this verdict: supported, refuted, understated, inconclusive, "not tested here",
            consistent or "contradicts itself".
        basis: Only verdicts with this evidence: measured, virtual, tried, predicted, "own numbers" or read. A claim
            that is not tested here has none.
        kind: Only claims of this kind: memory, bytes, time, capacity, convergence or configuration.
        file: A claims file, or a folder of claims files.
        verbose: Also print a line for every claim.
        checks: List every check that a claims file can name, with its arguments and an example.
        as_json: Print everything as JSON.
    """
    if checks:
        return say(*_checks(claim))
    known = files.read_all(file)
    filters = {"document": document, "verdict": verdict, "basis": basis, "kind": kind}
    filters = {name: wanted for name, wanted in filters.items() if wanted is not None}
    _check(filters, known)
    loaded = load(runs, every_folder_has_runs=True) if runs else load(evidence.default_folders())
    gathered = evidence.gather(loaded)
    chosen = [each for each in _named(claim, known) if _passes(each, filters, "document", "kind")]
    verdicts = ledger.judge_all(chosen, loaded, gathered)
    verdicts = [each for each in verdicts if _passes(each, filters, "verdict") and basis in (None, each.rests_on)]
    set_aside = [*(f"set aside: {reason}" for reason in gathered.set_aside), *gathered.notes]
    if as_json:
        entries = [{"plainly": words.plainly(verdict)} | ledger.as_json(verdict) for verdict in verdicts]
        sys.stderr.write("".join(f"{reason}\n" for reason in set_aside))
        return entries
    if not verdicts:
        say(f"No claim is left by {' '.join([*claim, *(f'--{name} {wanted!r}' for name, wanted in filters.items())])}.")
    elif claim:
        for number, verdict in enumerate(verdicts):
            say(*["", "-" * words.WIDTH, ""] * bool(number), *words.lines(verdict))
    else:
        if filters or verbose:
            show([_row(verdict) for verdict in verdicts])
            say("")
        _summary(verdicts)
        say("", f"{len(gathered.runs)} runs read in {', '.join(map(str, loaded.folders)) or 'no folder'}", *set_aside)


def _checks(names: tuple[str, ...]) -> list[str]:
    """The checks with these names, or all checks, with claims of this study as examples."""
    entries = catalogue.entries(files.read_all())
    known = [entry.name for entry in entries]
    for name in names:
        if name not in known:
            raise Stop(f"there is no check {name}", nearest(name, known))
    chosen = [line for entry in entries if not names or entry.name in names for line in ["", *catalogue.lines(entry)]]
    return [*catalogue.HEAD, *chosen, "", *catalogue.names()]


def _summary(verdicts: list[Verdict]) -> None:
    """Count the verdicts by document and by evidence, in at most 100 columns."""
    rows = [ledger.row(verdict) for verdict in verdicts]
    names = dict.fromkeys(row["document"] for row in rows)
    documents = {name: [row for row in rows if row["document"] == name] for name in names}
    world = {name: [row for row in claims if row["basis"] != OWN] for name, claims in documents.items()}
    show([{"document": name} | _counts(ledger.totals(claims)) for name, claims in world.items()])
    say("", *textwrap.wrap(APART, words.WIDTH), "")
    show([{"document": name} | ledger.bases(claims) | _apart(claims) for name, claims in documents.items()])
    say("")
    show([{"basis": totals["basis"]} | _counts(totals) for totals in ledger.by_basis(rows) if totals["basis"] != OWN])


def _counts(totals: dict) -> dict:
    """The totals without the verdicts that only apply to a document's own numbers."""
    return {name: totals[name] for name in ("claims", *VERDICTS) if name not in (CONSISTENT, CONTRADICTS)}


def _apart(rows: list[dict]) -> dict:
    """What is counted apart from claims about the world: a document's own numbers, and our premises."""
    own = ledger.totals([row for row in rows if row["basis"] == OWN])
    ours = sum(row["premise"] for row in rows)
    return {CONSISTENT: own[CONSISTENT], "contradictions": own[CONTRADICTS], "open": own[INCONCLUSIVE], "ours": ours}


def report(*, runs: tuple[Path, ...], out: Path = Path("reports/build"), readme: Path | None = None) -> None:
    """Write the report about some runs: web pages that open from disk. This executes the notebooks.

    Args:
        runs: Folders that contain runs, at any depth.
        out: The folder for the pages. An earlier report in it is replaced.
        readme: Also write the verdicts into this file, between its two marker lines.
    """
    from study.report.site import command

    sys.exit(command(runs, out, readme))


def _named(ids: tuple[str, ...], claims: list[Claim]) -> list[Claim]:
    """The claims with these ids, in upper or lower case; all claims if no id is given."""
    by_id = {claim.id.lower(): claim for claim in claims}
    for name in ids:
        if name.lower() not in by_id:
            close = difflib.get_close_matches(name.lower(), by_id, n=1)
            remedy = f"did you mean {by_id[close[0]].id!r}?" if close else "study claims --verbose lists all of them"
            raise Stop(f"there is no claim {name}", remedy)
    return [by_id[name.lower()] for name in ids] or claims


def _check(filters: dict[str, str], claims: list[Claim]) -> None:
    """Refuse a filter that no claim can pass."""
    documents = tuple(dict.fromkeys(claim.document for claim in claims))
    known = {"verdict": VERDICTS, "basis": BASES, "kind": SORTS, "document": documents}
    for name, wanted in filters.items():
        if wanted not in known[name]:
            what = f"--{name} must be one of {', '.join(known[name])} (got {wanted!r})"
            raise Stop(what, nearest(wanted, known[name], otherwise=f"correct --{name}"))


def _passes(thing: Claim | Verdict, filters: dict[str, str], *names: str) -> bool:
    return all(getattr(thing, name) == filters[name] for name in names if name in filters)


def _row(verdict: Verdict) -> dict:
    """A line of at most 100 columns."""
    claim = verdict.claim
    return {
        "claim": claim.id,
        "says": _cut(claim.says, 29),
        "value": _cut(SIGNS[claim.relation] + _number(verdict.claimed, claim.unit), 12),
        "found": _cut(ledger.without_unit(verdict.found, claim.unit), 12),
        "verdict": verdict.verdict,
        "basis": verdict.basis,
    }


def _number(value, unit: str) -> str:
    ends = value if isinstance(value, tuple) else (value,)
    return " to ".join(ledger.without_unit(end, unit) for end in ends)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
