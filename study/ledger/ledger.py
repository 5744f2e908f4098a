"""The ledger: claims and runs in, verdicts out; and verdicts as rows, as counts and as JSON.

A check computes every verdict. Verdicts that rest on a source, or on a document's own numbers, are counted separately.
"""

import math
from collections.abc import Iterable

from study.io.numbers import is_number, short
from study.io.words import distinct
from study.ledger import predictions
from study.ledger.arguments import as_list
from study.ledger.judging import SCALED, Verdict, in_units, judge
from study.ledger.model import Claim
from study.ledger.trial_checks import trials_of
from study.ledger.verdict import (
    BASES,
    FAILS,
    INCONCLUSIVE,
    NO_BASIS,
    NOT_TESTED,
    OWN,
    PREDICTED,
    READ,
    TRIED,
    VERDICTS,
    WORST_FIRST,
    allowed,
)
from study.probes import answers
from study.records.evidence import Evidence


def judge_all(claims: list[Claim], evidence: Evidence, anew: bool = False) -> list[Verdict]:
    """Return a verdict for each claim. All trials that the claims need run first, together.

    With `anew`, formulas are computed again, and not read from the cache.
    """
    answers.prepare(trials(claims))
    if anew:
        predictions.forget()
    verdicts = [judge(claim, evidence) for claim in claims]
    predictions.keep()
    return verdicts


def trials(claims: Iterable[Claim]) -> list[dict]:
    """Return the trials that these claims ask for."""
    tried = [check for claim in claims for check in claim.checks if check.basis == TRIED]
    cases = [case for check in tried for case in check.cases]
    return [trial for case in cases for trial in trials_of(case.function, case.calls)]


OF_A_RESULT = ("working", "holds_under", "fails_under", "evidence", "sentence", "differs", "missing")


def _without_unit(value, unit: str) -> str:
    """Return a value, or several, for a place that names the unit elsewhere."""
    return in_units(value, unit if unit in SCALED else "")


def row(verdict: Verdict) -> dict:
    """Return a verdict as a flat row."""
    claim = verdict.claim
    return {
        "claim": claim.id,
        **_fields(claim, "document", "title", "where", "says", "quote", "premise", "contradiction"),
        "by_construction": verdict.is_by_construction,
        **_fields(verdict, "verdict", "basis"),
        "found": _without_unit(verdict.found, claim.unit),
        "working": verdict.working,
        "evidence": ", ".join(verdict.evidence),
        "differs": "; ".join(verdict.differs),
        "missing": verdict.missing,
    }


def _fields(thing: object, *names: str) -> dict:
    return {name: getattr(thing, name) for name in names}


def once(rows: list[dict]) -> list[dict]:
    """Return one row of those that share a contradiction, also if they are of several documents, and all others."""
    chosen: dict[str, str] = {}
    for row in sorted(rows, key=lambda row: WORST_FIRST.index(row["verdict"])):
        chosen.setdefault(row["contradiction"] or row["claim"], row["claim"])
    return [row for row in rows if row["claim"] in chosen.values()]


def counted(rows: list[dict]) -> list[dict]:
    """Return the rows that count: no premises, nothing by construction, one of those that share a contradiction."""
    return [row for row in once(rows) if not row["premise"] and not row["by_construction"]]


def totals(rows: list[dict]) -> dict:
    """Return how many claims have each verdict, and how many premises there are besides."""
    verdicts = [row["verdict"] for row in counted(rows)]
    counts = {name: verdicts.count(name) for name in VERDICTS}
    return {"claims": len(verdicts)} | counts | {"premises": sum(row["premise"] for row in rows)}


def by_document(rows: list[dict]) -> list[dict]:
    """Return how many claims of each document have each verdict."""
    titles = {row["document"]: row["title"] for row in rows}
    groups = {document: [row for row in once(rows) if row["document"] == document] for document in titles}
    return [{"document": document, "title": titles[document]} | totals(groups[document]) for document in titles]


def by_basis(rows: list[dict]) -> list[dict]:
    """Return how many claims of each basis have each verdict. What was not tested has none."""
    groups: dict[str, list[dict]] = {basis: [] for basis in (*BASES, NO_BASIS)}
    for row in counted(rows):
        groups[NO_BASIS if row["verdict"] == NOT_TESTED else row["basis"]].append(row)
    return [{"basis": basis} | totals(group) for basis, group in groups.items() if group]


def bases(rows: list[dict]) -> dict:
    """Return how many verdicts rest on each basis, without own numbers and without claims that were not tested."""
    resting = [row["basis"] for row in counted(rows) if row["verdict"] != NOT_TESTED]
    return {basis: resting.count(basis) for basis in BASES if basis != OWN}


def as_json(verdict: Verdict) -> dict:
    """Return a verdict as JSON."""
    claim = verdict.claim
    also = [_result(other) | {"check": check.check} for other, check in zip(verdict.also, claim.also, strict=True)]
    return {
        **_fields(claim, "id", "document", "quote", "where", "says", "kind"),
        "value": _json_value(verdict.claimed),
        **_fields(claim, "unit", "relation", "tolerance", "better", "premise", "contradiction", "unsaid"),
        **_fields(claim, "central", "suspected", "would_decide"),
        "by_construction": verdict.is_by_construction,
        "fixed": str(claim.fixed),
        **_fields(claim, "conditions", "reading", "check"),
        **_result(verdict),
        **_fields(verdict, "open_because", "holding", "tolerances"),
        "otherwise": otherwise(verdict),
        "also": also,
    }


def _result(verdict: Verdict) -> dict:
    values = {name: _json_value(getattr(verdict, name)) for name in ("found", "interval")}
    return _fields(verdict, "verdict", "basis") | values | _fields(verdict, *OF_A_RESULT)


def _json_value(value: object) -> object:
    """Return a value for JSON, which has no infinity: there it is "never"."""
    if isinstance(value, (list, tuple)):
        return [_json_value(each) for each in value]
    return "never" if isinstance(value, float) and not math.isfinite(value) else value


def otherwise(verdict: Verdict) -> str:
    """Return what would change the verdict."""
    claim = verdict.claim
    if verdict.holds_under or verdict.fails_under:
        return f"knowing what the document leaves open: {', '.join(claim.unsaid)}"
    if verdict.found is None or verdict.verdict in (NOT_TESTED, INCONCLUSIVE):
        return verdict.missing or "a finding that lies entirely inside or outside of what the claim allows"
    values = as_list(verdict.claimed)
    if verdict.basis == READ and not any(map(is_number, values)):
        return "a source that says otherwise"
    allows = distinct((_allowed(value, claim) for value in values), ", ")
    words = f"finding {allows}" if verdict.verdict in FAILS else f"finding anything but {allows}"
    to_run = f"runs, which decide before a prediction: {verdict.missing}"
    return distinct([words, to_run if verdict.missing and verdict.basis == PREDICTED else ""])


def _allowed(value: object, claim: Claim) -> str:
    """Return what a check may find if the claim holds."""
    if not is_number(value):
        return f"“{value}”" if isinstance(value, str) else short(value)
    low, high = allowed(value, claim.relation, claim.tolerance)
    least = _without_unit(low, claim.unit)
    most = _without_unit(high, claim.unit)
    if math.isinf(low):
        return f"{most} or less"
    if math.isinf(high):
        return f"{least} or more"
    return least if low == high else f"{least} to {most}"
