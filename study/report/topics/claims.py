"""Claims as tables: what documents stand for, and what was found."""

import pandas as pd

from study.ledger import texts


def table(document: str = "", central: bool = False) -> pd.DataFrame:
    """Return the claims of a document, or of all; `central`: only those that a document stands for."""
    rows = [
        {"claim": each.id, "question": each.question, "verdict": each.outcome}
        | {"certainty": each.certainty or "", "found": each.found}
        for each in texts.claims()
        if document in ("", each.document) and each.central >= central
    ]
    return pd.DataFrame(rows)
