"""The page of all claims, and of the faults of libraries."""

from collections import defaultdict
from pathlib import Path

from study.ledger import texts
from study.report.templating import write_page


def write(path: Path, titles: dict[str, str]) -> None:
    """Write the page, with a place for each claim and fault: `claims.html#S000-20`."""
    alike = defaultdict(list)
    for claim in texts.claims():
        alike[claim.question].append(claim.id)
    values = {"texts": texts.texts(), "faults": texts.faults(), "alike": alike}
    count = texts.in_words(texts.claims())
    write_page(path, "claims.html", titles=titles, here="claims", count=count, **values)
