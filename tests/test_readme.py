"""The tables and numbers of the READMEs, which people write, are those of the ledger and of the records."""

import re

from conftest import ROOT

from study.core.text import size
from study.ledger import texts
from study.records import runs
from study.report import answers

TEXT = (ROOT / "README.md").read_text()
KEPT = ROOT / "reports" / "cpu-2core"


def rows_of(text: str) -> dict[str, tuple[str, ...]]:
    """The rows of all tables by their first cell, without the escapes of Markdown."""
    lines = [re.split(r"(?<!\\)\|", line) for line in re.findall(r"^\|(.*)\|$", text, re.MULTILINE)]
    cells = [[re.sub(r"\\(.)", r"\1", cell.strip()) for cell in line] for line in lines]
    return {first: tuple(others) for first, *others in cells}


def test_the_central_claims_and_the_count_of_verdicts():
    known = {each.id: (each.outcome, each.certainty or "", each.found) for each in texts.claims()}
    printed = {name: row for name, row in rows_of(TEXT).items() if name in known}
    assert len(printed) == len(texts.texts())
    assert printed == {name: known[name] for name in printed}
    counted = rows_of((KEPT / "README.md").read_text())
    for row in texts.by_document():
        assert counted[row.pop("document")] == tuple(map(str, row.values()))


def test_the_sizes_and_the_advice():
    rows = answers.of_memory(runs.load(KEPT / "runs" / "at_scale")).rows
    held = rows[(rows["source"] == "measured") & (rows["model"] == "Llama-3-8B")].groupby("arm")["bytes"].sum()
    assert all(f"{size(held[arm])} under" in TEXT for arm in ("ddp", "zero1", "zero2", "zero3"))
    assert all(line in TEXT for line in answers.advice())
