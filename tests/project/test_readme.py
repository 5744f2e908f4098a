"""The tables and numbers of the READMEs, which people write, are those of the ledger and of the records."""

import re

from conftest import ROOT

from study.core.text import size
from study.ledger import texts
from study.records import runs
from study.report import answers

TEXT = (ROOT / "README.md").read_text()
KEPT = ROOT / "reports" / "cpu-2core"


def rows_of(text: str) -> dict[str, list[str]]:
    """The rows of all tables by their first cell."""
    lines = [line.split("|") for line in re.findall(r"^\|(.*)\|$", text, re.MULTILINE)]
    return {first.strip(): [cell.strip() for cell in cells] for first, *cells in lines}


def test_the_verdicts_and_their_counts():
    known = {claim.id: [claim.verdict, claim.certainty or ""] for claim in texts.claims()}
    printed = {name: row[:2] for name, row in rows_of(TEXT).items()}
    assert len(printed.keys() & known.keys()) > 8
    assert {name: printed.get(name, verdict) for name, verdict in known.items()} == known
    counted = rows_of((KEPT / "README.md").read_text())
    for row in texts.by_document():
        assert counted[row.pop("document")] == list(map(str, row.values()))


def test_the_sizes_and_the_advice():
    rows = answers.of_memory([], answers.of_scale(runs.load(KEPT / "runs" / "at_scale"))).rows
    held = rows[(rows["source"] == "measured") & (rows["model"] == "Llama-3-8B")].groupby("arm")["bytes"].sum()
    assert all(f"{size(held[arm])} under" in " ".join(TEXT.split()) for arm in ("ddp", "zero1", "zero2", "zero3"))
    assert all(line in TEXT for line in answers.advice())
