"""How certain a verdict is, and why a claim is open."""

from dataclasses import replace

import pytest
from test_ledger import ALSO, HEAD, claims, judged, only, text  # noqa: F401

from study.ledger import judging, ledger
from study.ledger import verdict as v
from study.ledger.certainty import certainty

EVEN = '\ndecides = "{}"\nvalue = 3\nunit = "tokens"\nrelation = "at_most"\ntolerance = 0\n'


@pytest.mark.parametrize(("decides", "because"), [("evidence", judging.CONFLICTING), ("reading", judging.UNSAID)])
def test_a_further_check_that_decides_too_opens_a_claim(decides, because, claims):  # noqa: F811
    """By the first check two tokens are not three, by the second they are at most three."""
    further = ALSO.rstrip("\n") + EVEN.format(decides) + "with = { times = [4], over = [2] }\n"
    verdict = only(judged(claims(text(value="3") + further)))
    assert [verdict.verdict, verdict.open_because] == [v.INCONCLUSIVE, because]
    agreeing = only(judged(claims(text() + further)))
    assert [agreeing.verdict, agreeing.open_because] == [v.CONSISTENT, None]


def test_an_open_claim_says_in_how_many_cases_it_holds(claims):  # noqa: F811
    unsaid = "\n[claim.unsaid]\ntimes = [[4], [9], [4]]\n"
    verdict = only(judged(claims(text() + unsaid)))
    assert [verdict.open_because, verdict.holding] == [judging.UNSAID, "holds in 2 of 3 cases"]
    assert certainty(verdict) is None


def test_a_tolerance_that_decides_is_seen(claims):  # noqa: F811
    """2 is within 5 % of 2.08, and not within half of that."""
    verdict = only(judged(claims(text(value="2.08"))))
    assert verdict.tolerances == (v.CONTRADICTS, v.CONSISTENT)
    assert certainty(verdict).level == "moderate"


DOUBTS = [
    ({}, "high"),
    ({"basis": v.PREDICTED}, "low"),
    (
        {"basis": v.VIRTUAL, "differs": ("virtual ranks: a single real rank, whose collectives move nothing",)},
        "moderate",
    ),
    ({"differs": ("device CPU instead of NVIDIA H200",)}, "moderate"),
    ({"differs": ("3 of 3 runs are from another version of the instruments",)}, "high"),
    ({"interval": (1.0, 3.0)}, "moderate"),
    ({"interval": (1.0, 3.0), "differs": ("model gpt-tiny",), "tolerances": (v.REFUTED,)}, "very low"),
    ({"basis": v.READ, "evidence": ("000",)}, "very low"),
]


@pytest.mark.parametrize(("changes", "level"), DOUBTS)
def test_certainty_goes_down_for_each_reason_to_doubt(changes, level, claims):  # noqa: F811
    verdict = replace(only(judged(claims())), verdict=v.SUPPORTED, basis=v.MEASURED, tolerances=())
    assert certainty(replace(verdict, **changes)).level == level


def test_what_was_suspected_or_is_true_by_construction_says_less(claims):  # noqa: F811
    suspected = only(judged(claims(head=HEAD + "suspected = true\n")))
    assert certainty(suspected).level == "moderate"
    construction = only(judged(claims(text(by_construction='"by definition"'))))
    assert certainty(construction) is None
    assert ledger.counted([ledger.row(construction)]) == []
