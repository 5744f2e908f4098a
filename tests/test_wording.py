"""What people read is English: also of one thing, without names of our code, with the cells of a table apart."""

import json

import pytest
import wording
from conftest import ROOT

from study.ledger import files, ledger, words
from study.probes import answers
from study.records import evidence
from study.records.runs import load

VERBATIM = ("check ", "evidence ", "elsewhere ", "where ", "quote ", "sentence ", "nearest ", "reading ")


def test_a_fault_is_seen():
    assert list(wording.miscounted("we find 1 times the bytes, 1 of 1 runs, 41 pairs of 1 sources")) == [
        "find 1 times",
        "of 1 runs",
        "of 1 sources",
    ]
    assert list(wording.miscounted("stage 1 holds 1 run, and rank 1 is one of 1.1 times")) == []
    assert wording.names_of_code("with micro_batch 4: component.weights, under zero3_cpu") == [
        "micro_batch",
        "component.weights",
    ]
    assert wording.GLUED.search("ZeRO-076GB76GB~7B")
    assert words.readable("micro_batch 1: memory.components.per_rank.0.after_step.moments {'0': [1, 2]}") == (
        "rows a pass 1: moments after a step 0: 1, 2"
    )


def test_kept_texts_are_english():
    texts = {path.name: path.read_text() for path in (ROOT / "tests" / "golden").glob("*.txt")}
    kept = json.loads((ROOT / "reports" / "verdicts.json").read_text())
    texts |= {name: words.readable(each["turned_by"] or "") for name, each in kept.items()}
    texts |= {str(number): each.told for number, each in enumerate(answers.kept_answers())}
    assert {name: found for name, text in texts.items() if (found := list(wording.miscounted(text)))} == {}
    assert {name: found for name in kept if (found := wording.names_of_code(texts[name]))} == {}


def test_cells_of_a_quoted_table_are_apart():
    glued = {claim.id: claim.quote for claim in files.read_all() if wording.GLUED.search(claim.quote or "")}
    assert glued == {}


@pytest.mark.slow
def test_every_claim_is_said_in_a_readers_words():
    verdicts = ledger.judge_all(files.read_all(), evidence.gather(load(evidence.default_folders())))
    faults: dict[str, list[str]] = {}
    for verdict in verdicts:
        label = ""
        for line in words.lines(verdict):
            label = line[:12] if line[:12].strip() else label
            if not label.startswith(VERBATIM):
                faults.setdefault(verdict.claim.id, []).extend(
                    [*wording.miscounted(line), *wording.names_of_code(line)]
                )
    assert {name: found for name, found in faults.items() if found} == {}
