"""The numbers in the sentences of claims and faults are those that their evidence gives."""

import json
import re
from typing import get_args

import keep_answers
import pytest

from study.core.errors import Stop
from study.core.text import is_number
from study.ledger import texts
from study.ledger.evidence import REPORTS, calculated, kept_answers
from study.records import runs

LEVELS = get_args(texts.CertaintyWord)
# The most certain that a claim can be with this as its best evidence; all other kinds allow "high".
MOST_CERTAIN = {"virtual": "moderate", "source": "low", "formula": "low", "prediction": "low"}
CLAIMS = texts.claims()
EVIDENCE = [
    pytest.param(claim, each, id=f"{claim.id}-{number}")
    for claim in CLAIMS
    for number, each in enumerate(claim.evidence, 1)
    if each.kind != "source"
]


@pytest.fixture(scope="module")
def records():
    return runs.load(sorted(REPORTS.glob("*/runs"))).counting


@pytest.mark.parametrize(("claim", "piece"), EVIDENCE)
def test_evidence_gives_the_number_of_the_sentence(claim, piece, records):
    value = piece.computed(records)
    assert piece.agrees(value), f"written {piece.value}, computed {value}"


def test_runs_on_a_gpu_change_no_evidence_that_names_none(records):
    """They are evidence where a selection says so, and where nothing else is there."""
    (piece,) = [each.values[1] for each in EVIDENCE if each.id == "S000-06-1"]
    assert piece.model_copy(update={"where": piece.where | {"device": "cuda"}}).computed(records) > 42.7
    on_gpu, others = (
        [run for run in records if (run.record.observed.device == "cuda") == wanted] for wanted in (True, False)
    )
    assert len(on_gpu) > 30
    assert piece.computed(on_gpu) > 42.7
    measured = [each.values[1] for each in EVIDENCE if each.values[1].kind in ("runs", "virtual")]
    assert [each.computed(records) for each in measured] == [each.computed(others) for each in measured]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_claim_has_the_numbers_of_its_evidence_and_what_its_verdict_needs(claim):
    for piece in claim.evidence:
        if is_number(piece.value):
            text = f"{claim.found} {getattr(piece, 'quote', '')}".replace(",", "")
            forms = "|".join({re.escape(f"{piece.value:g}"), re.escape(str(piece.value))})
            assert re.search(rf"(?<![\d.])({forms})(?!\d)", text), piece
    is_open = claim.verdict == "cannot be decided here"
    assert 0 < len(claim.quote.split()) <= 60
    assert bool(claim.condition) == (is_open or claim.verdict == "holds only if")
    assert is_open or (claim.certainty and claim.because and claim.evidence)
    if claim.certainty:  # no higher than the evidence allows
        allowed = [LEVELS.index(MOST_CERTAIN.get(piece.kind, "high")) for piece in claim.evidence]
        assert LEVELS.index(claim.certainty) >= min(allowed)


def test_kept_answers_are_what_faults_say_and_of_the_scripts_as_they_are():
    for fault in texts.faults():
        assert kept_answers()[fault.script] == fault.value, fault.id
    kept = json.loads((REPORTS / "cpu-2core" / "trials.json").read_text())
    scripts = {row["trial"]["name"]: row["code"] for row in kept if row["trial"]["what"] == "reproduction"}
    assert scripts == {name: keep_answers.code_of(name) for name in scripts}


def test_the_ledger_is_whole():
    for text in texts.texts():
        assert 3 <= sum(claim.central for claim in text.claim) <= 5, text.document
        assert 0 < text.judged <= text.sentences
    ids = [each.id for each in (*CLAIMS, *texts.faults())]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("expression", "value"), [("400 * 38e12 / 1e15", 15.2), ("-(2 + 3) ** 2", -25), ("states(1, 0, 1)", 16)]
)
def test_an_expression_is_computed(expression, value):
    assert calculated(expression) == pytest.approx(value)


@pytest.mark.parametrize("expression", ["__import__('os')", "1 / 0", "2 +", "[1]", "states.x"])
def test_nothing_else_is_computed(expression):
    with pytest.raises(ValueError, match="cannot be computed"):
        calculated(expression)


def test_claims_are_found_by_id_document_and_words():
    first = CLAIMS[0]
    assert texts.named((first.id.lower(),)) == [first]
    assert texts.named((first.document,)) == [each for each in CLAIMS if each.document == first.document]
    assert all("60 GB" in f"{each.quote} {each.found}" for each in texts.named(("60", "GB")))
    with pytest.raises(Stop):
        texts.named(("no such words",))


def test_other_runs_agree_differ_or_decide_nothing(records):
    answers = {row.answer for row in texts.compared(CLAIMS, records)}
    assert answers == {texts.AGREES}
    without = [run for run in records if run.record.arm != "zero2"]
    assert {row.answer for row in texts.compared(CLAIMS, without)} >= {texts.AGREES, texts.NO_RUNS}
