"""How a verdict reads: the sentence, the lines, the list of checks, and the claims file of CONTRIBUTING.md."""

import re

import pandas as pd
import pytest
from conftest import ROOT

from study.cli import results
from study.io.numbers import number_of, part_of, quantity, size, times
from study.ledger import catalogue, files, ledger, words
from study.ledger import verdict as v
from study.ledger.judging import Verdict
from study.ledger.model import Claim
from study.ledger.verdict import MEASURED, OWN, PREDICTED, READ, TRIED, VIRTUAL
from study.records.evidence import Evidence
from study.report import claim_pages
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


SHARE = {"unit": "of the peak saved", "value": 0.5, "with": {"quantity": "states_saving", "stage": 2, "ranks": 8}}
FITS = {"unit": "", "value": "fits", "check": "fits"}
FITS |= {"with": {"parameters": 1e9, "stage": 0, "gpu": "L4", "states_only": True}}
ACCEPTED = {"unit": "", "value": "accepted", "check": "tried"}
ACCEPTED |= {"with": {"what": "reproduction", "name": "sgd_becomes_adam"}}
LEFT_OPEN = {"unsaid": {"recipe": ["mixed-adam", "fp32-adam"]}, "holds_under": ("recipe mixed-adam",)}
RUNS = tuple(f"run{n}" for n in range(28))


VERDICTS = (
    judged(v.SUPPORTED),
    judged(v.REFUTED, MEASURED, 185e9, evidence=RUNS),
    judged(v.UNDERSTATED, relation="at_most"),
    judged(v.REFUTED, TRIED, 0.31, **SHARE),
    judged(v.REFUTED, found="does not fit", **FITS),
    judged(v.REFUTED, TRIED, "rejected", **ACCEPTED),
    judged(v.REFUTED, MEASURED, evidence=("a", "b"), differs=("device CPU instead of T4",)),
    judged(v.REFUTED, premise=True, quote=None),
    judged(v.REFUTED, READ, found=False, evidence=("P1", "Q7")),
    judged(v.SUPPORTED, VIRTUAL, evidence=("a",)),
    judged(v.SUPPORTED, READ, evidence=("P1", "Q7", "Q8")),
    judged(v.CONTRADICTS, OWN),
    judged(v.INCONCLUSIVE),
    judged(v.INCONCLUSIVE, found=None),
    judged(v.INCONCLUSIVE, fails_under=("recipe fp32-adam",), **LEFT_OPEN),
    judged(v.INCONCLUSIVE, **LEFT_OPEN),
    judged(v.NOT_TESTED, MEASURED, None, settle={"machine": "8 x H100", "command": "study sweep h100"}),
    judged(v.REFUTED, found=[90e9, 90e9], value=[45e9, 45e9]),
    judged(v.SUPPORTED, document="pages", where="DeepSpeed, post of 8 March 2021 (commit 1), table 2"),
    judged(v.SUPPORTED, premise=True, quote="45 GB"),
    judged(v.SUPPORTED, document="P1", title="ZeRO: Memory (2020)"),
)
NUMBERS = (
    (4.273e10, "bytes"),
    ([1.2e11, 1.88e9], "bytes"),
    (3.2e10, "bytes per second"),
    (16, "bytes a parameter"),
    (42.7, "GB"),
    ([0.95, 0.78], "of ZeRO-0's speed"),
    (0.125, "share saved"),
    (13, "of 20 steps taken"),
    (5e8, "elements"),
    (2.532e-6, "times the weights"),
    (True, ""),
    (float("inf"), "GPUs"),
)


def test_a_claim_begins_with_a_sentence(golden):
    """The sentence has the claim, the finding and the basis, in human units. So have numbers alone."""
    sentences = [words.plainly(verdict) for verdict in VERDICTS]
    numbers = [f"{value} {unit}: {words.with_unit(value, unit)}" for value, unit in NUMBERS]
    golden("claim_sentences.txt", "\n".join([*sentences, "", *numbers]))


def test_a_claim_in_full(golden):
    """Lists are cut, and no line has more than a hundred columns."""
    cases = tuple(f"case {n}" for n in range(9))
    about = {"unsaid": {"recipe": ["mixed-adam", "fp32-adam"]}, "quote": "45 GB", "reading": "word " * 40}
    verdict = judged(v.INCONCLUSIVE, MEASURED, evidence=RUNS, differs=RUNS, holds_under=cases, **about)
    lines = words.lines(verdict)
    assert max(map(len, lines)) <= words.WIDTH
    golden("claim_in_full.txt", "\n".join(lines))


# --- how many ------------------------------------------------------------------------------------------------------


def row(word: str, basis: str, number: int, premise: bool = False, contradiction: str | None = None) -> dict:
    about = {"claim": f"X-{number}", "document": "libraries", "title": "A title"}
    about |= {"premise": premise, "by_construction": False, "contradiction": contradiction}
    return about | {"verdict": word, "basis": basis, "suspected": False}


ROWS = [row(v.SUPPORTED, MEASURED, 1), row(v.NOT_TESTED, MEASURED, 2), row(v.REFUTED, PREDICTED, 3)]
ROWS += [row(v.CONTRADICTS, OWN, 4, contradiction="tokens"), row(v.CONTRADICTS, OWN, 5, contradiction="tokens")]
ROWS += [row(v.INCONCLUSIVE, OWN, 6), row(v.REFUTED, READ, 7, premise=True)]
ROWS += [row(v.SUPPORTED, PREDICTED, 8) | {"by_construction": True}, row(v.REFUTED, TRIED, 9) | {"suspected": True}]


def test_headlines_say_what_rests_on_real_runs(golden):
    """Untested claims have no basis, a contradiction counts once, premises do not count, what we suspected is apart."""
    golden("claim_headline.txt", claims.sentence(pd.DataFrame(ROWS)))
    assert claims.sentence(pd.DataFrame()) == ""


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


@pytest.mark.parametrize(
    ("findings", "answer"),
    [
        (
            [v.SUPPORTED, v.REFUTED],
            "In part: of 2 claims that this text stands for, 1 is supported and 1 is refuted; certainty: low (2).",
        ),
        (
            [v.REFUTED, "too uncertain to say"],
            "No: of 2 claims that this text stands for, 1 is refuted and 1 is open; certainty: low (1).",
        ),
        (
            ["too uncertain to say"],
            "Nothing could be decided here: of 1 claim that this text stands for, 1 is open; certainty: none.",
        ),
    ],
)
def test_a_text_is_answered_by_its_central_claims(findings, answer):
    rows = [
        {"claim": f"A-{n}", "central": "x", "summary": {"claimed": "It is so", "finding": each, "rests on": READ}}
        for n, each in enumerate(findings)
    ]
    for row in rows:
        decided = row["summary"]["finding"] in (v.SUPPORTED, v.REFUTED)
        row["summary"]["certainty"] = "low" if decided else ""
    refuted = " Refuted: “It is so”." if v.REFUTED in findings else ""
    assert claims.answer(pd.DataFrame(rows)) == f"**{answer}**{refuted}"


def test_a_finding_is_divided_by_the_claimed_value_but_not_by_a_limit():
    relations = {"equal": "1.5", "below": ""}
    for relation, ratio in relations.items():
        verdict = judged(v.REFUTED, relation=relation, value=2e9, found=3e9)
        assert words.summary(verdict)["found / claimed"] == ratio
    assert words.summary(judged(v.INCONCLUSIVE, found=3e9))["found / claimed"] == ""


# --- for a stranger ------------------------------------------------------------------------------------------------


def test_every_check_is_listed_with_its_purpose(capsys, golden):
    claims = files.read_all()
    assert catalogue.checks().keys() >= {"arithmetic", "states_bytes", "ratio", "default", "reproduction"}
    for name in catalogue.checks():
        assert len(catalogue.lines(name, claims)[1].strip()) > 20, f"{name} has no docstring"
    results.claims(("states_bytes", "peak_bytes", "ratio"), checks=True)
    golden("command_claims_checks.txt", capsys.readouterr().out)


def test_the_claims_file_of_the_guide_is_valid(tmp_path):
    """Its three claims have the verdicts that the guide says."""
    guide = (ROOT / "CONTRIBUTING.md").read_text().split("## How to write a claims file")[1]
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(re.findall(r"^    (.*)$", guide, re.MULTILINE)))
    first, second, third = ledger.judge_all(files.read_all(path), Evidence())
    assert (first.verdict, first.holds_under) == (v.INCONCLUSIVE, ("recipe mixed-adam",))
    assert (second.verdict, third.verdict) == (v.CONSISTENT, v.NOT_TESTED)


def test_the_report_says_how_to_object():
    text = claim_pages.objecting()
    assert "names the claim's id" in text
    assert "\n## " not in text


def test_one_of_a_thing_has_no_plural():
    assert [number_of(n, "passes") for n in (0, 1, 2)] == ["0 passes", "1 pass", "2 passes"]
    assert quantity(1, "calls of deepspeed.initialize") == "1 call of deepspeed.initialize"
    assert quantity(1, "times DDP's bytes") == "1.0 times DDP's bytes", "a ratio"
    assert quantity("yes", "") == "yes"
    assert (size(1), quantity(1, "GB/s"), quantity(1, "s"), times(0.999)) == ("1 byte", "1 GB/s", "1 s", "1.0 times")
    assert [part_of(*n, "runs") for n in ((1, 1), (1, 2), (2, 2))] == [
        "the only run is",
        "1 of 2 runs is",
        "2 of 2 runs are",
    ]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("memory.components.per_rank.0.after_step.moments", "moments after a step"),
        ("observed.runs.1.losses.-1", "losses of training 1"),
        ("observed.runs.1", "values of training 1"),
    ],
)
def test_a_field_of_a_record_is_said_in_words(path, expected):
    assert words.readable(path) == expected
