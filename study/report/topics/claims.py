"""Claims as tables: what texts stand for, and what was found."""

from collections.abc import Iterable

import pandas as pd

from study.ledger import texts
from study.ledger.texts import Claim


def table(claims: Iterable[Claim]) -> pd.DataFrame:
    rows = [
        {"claim": each.id, "question": each.question, "verdict": each.outcome}
        | {"certainty": each.certainty or "", "found": each.found}
        for each in claims
    ]
    return pd.DataFrame(rows)


def of(document: str) -> list[Claim]:
    return [claim for claim in texts.claims() if claim.document == document]


def headline() -> pd.DataFrame:
    """Return the first claim of each text: the one that it stands for most."""
    first = [next(claim for claim in text.claim if claim.central) for text in texts.texts()]
    return table(first).drop(columns="question")
