"""The verdicts of the ledger as rows. The one place where reports and notebooks meet it."""

from study.evidence import Evidence

DOCUMENTS = ("000", "001", "002", "003", "libraries")


def judged(evidence: Evidence, document: str | None = None) -> list[dict]:
    """Every claim with its verdict on this evidence, those of one document if it is named."""
    try:
        from study import ledger
    except ImportError:
        return []
    rows = [row(verdict) for verdict in ledger.judge([run.made for run in evidence.runs])]
    return [one for one in rows if document in (None, one["document"])]


def row(verdict) -> dict:
    """A verdict, flat."""
    claim = verdict.claim
    return {
        "claim": claim.id,
        "document": claim.document,
        "where": claim.where,
        "says": claim.says,
        "verdict": verdict.verdict,
        "by": verdict.by,
        "found": verdict.found,
        "working": verdict.working,
        "evidence": ", ".join(verdict.evidence),
        "differs": "; ".join(verdict.differs),
        "missing": verdict.missing,
    }


def by_document(rows: list[dict]) -> list[dict]:
    """How many claims of each document came to what."""
    verdicts = ("supported", "refuted", "inconclusive", "not tested here")
    found = []
    for document in dict.fromkeys(row["document"] for row in rows):
        mine = [row["verdict"] for row in rows if row["document"] == document]
        found.append({"document": document, "claims": len(mine)} | {name: mine.count(name) for name in verdicts})
    return found
