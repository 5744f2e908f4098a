"""Which claims a headline has, the ratio of found and claimed, and the claims file of CONTRIBUTING.md."""

import re

import pandas as pd
from conftest import ROOT

from study.ledger import files, ledger, words
from study.ledger import verdict as v
from study.ledger.judging import Verdict
from study.ledger.model import Claim
from study.ledger.verdict import MEASURED, OWN, PREDICTED, READ
from study.records.evidence import Evidence
from study.report.topics import claims

CLAIM = {"id": "X-1", "document": "000", "title": "A title (2025)", "fixed": "2026-11-20", "text": None, "read": None}
CLAIM |= {"where": "table 1", "says": "stage 2 takes 45 GB", "kind": "memory", "value": 45e9, "unit": "bytes"}
CLAIM |= {"tolerance": 0, "conditions": {}, "check": "theory"}
CLAIM |= {"with": {"quantity": "states_bytes", "stage": 2, "ranks": 8, "parameters": 9e9}}


def judged(word: str, basis: str = PREDICTED, found: object = 42.7e9, **more) -> Verdict:
    """A verdict on a claim. Fields of the claim are given by name."""
    fields = {name: more.pop(name) for name in list(more) if name not in Verdict.__dataclass_fields__}
    claim = Claim.model_validate(CLAIM | fields, strict=False)
    empty = {"interval": None, "working": "", "evidence": (), "differs": (), "missing": "", "claimed": claim.value}
    return Verdict(claim=claim, verdict=word, basis=basis, found=found, **empty | more)


def test_the_headline_has_the_most_certain_central_claim_of_each_text():
    def central(claim: str, certainty: str, basis: str) -> dict:
        summary = {"claimed": "It holds", "finding": v.SUPPORTED, "certainty": certainty, "rests on": basis}
        return {"claim": claim, "document": claim.split("-")[0], "central": "it is its abstract", "summary": summary}

    rows = [central("A-1", "low", READ), central("A-2", "low", MEASURED), central("A-3", "", READ)]
    rows += [central("B-1", "high", OWN), central("B-2", "very low", PREDICTED), central("C-1", "high", OWN)]
    rows += [central("D-1", "high", READ) | {"central": ""}]
    assert list(claims.headline(pd.DataFrame(rows))["claim"]) == ["A-2", "B-2"], "the text itself is no evidence"
    rows += [central(f"E{number}-1", "moderate", READ) for number in range(9)]
    assert list(claims.headline(pd.DataFrame(rows))["claim"]) == [f"E{number}-1" for number in range(7)]


def test_a_finding_is_divided_by_the_claimed_value_but_not_by_a_limit():
    relations = {"equal": "1.5", "below": ""}
    for relation, ratio in relations.items():
        verdict = judged(v.REFUTED, relation=relation, value=2e9, found=3e9)
        assert words.summary(verdict)["found / claimed"] == ratio
    assert words.summary(judged(v.INCONCLUSIVE, found=3e9))["found / claimed"] == ""


def test_the_claims_file_of_the_guide_is_valid(tmp_path):
    """Its three claims have the verdicts that the guide says."""
    guide = (ROOT / "CONTRIBUTING.md").read_text().split("## How to write a claims file")[1]
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(re.findall(r"^    (.*)$", guide, re.MULTILINE)))
    first, second, third = ledger.judge_all(files.read_all(path), Evidence())
    assert (first.verdict, first.holds_under) == (v.INCONCLUSIVE, ("recipe mixed-adam",))
    assert (second.verdict, third.verdict) == (v.CONSISTENT, v.NOT_TESTED)
