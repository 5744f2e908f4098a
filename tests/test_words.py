"""How a verdict reads: the sentence, the lines, the list of checks, and the claims file of CONTRIBUTING.md."""

import re

import pandas as pd
import pytest
from conftest import ROOT

from study.cli import results
from study.ledger import catalogue, files, ledger, model, words
from study.ledger import verdict as v
from study.ledger.arguments import argument_model
from study.ledger.ledger import Verdict
from study.ledger.model import MEASURED, OWN, PREDICTED, READ, TRIED, VIRTUAL, Claim
from study.records.runs import Runs
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
FITS = {
    "unit": "",
    "value": "fits",
    "check": "fits",
    "with": {"parameters": 1e9, "stage": 0, "gpu": "L4", "states_only": True},
}
ACCEPTED = {
    "unit": "",
    "value": "accepted",
    "check": "tried",
    "with": {"what": "reproduction", "name": "sgd_becomes_adam"},
}
PARSED = {"with": {"what": "deepspeed_config", "config": [{"train_batch_size": 1}, {"train_batch_size": 2}]}}
LEFT_OPEN = {"unsaid": {"recipe": ["mixed-adam", "fp32-adam"]}, "holds_under": ("recipe mixed-adam",)}
RUNS = tuple(f"run{n}" for n in range(28))


@pytest.mark.parametrize(
    ("verdict", "sentence"),
    [
        (judged(v.SUPPORTED), "we find 42.7 GB, so it is supported (predicted by a formula)."),
        (
            judged(v.REFUTED, MEASURED, 185e9, evidence=RUNS),
            "185 GB instead of 45 GB, so it is refuted (measured in 28 real",
        ),
        (
            judged(v.UNDERSTATED, relation="at_most"),
            "42.7 GB instead of at most 45 GB, which is better, so it is understated",
        ),
        (
            judged(v.REFUTED, TRIED, 0.31, **SHARE),
            "we find 31 % of the peak saved instead of 50 %, so it is refuted (tried",
        ),
        (
            judged(v.REFUTED, found="does not fit", **FITS),
            "; 1 billion parameters do not fit under stage 0, so it is refuted (predicted by a formula).",
        ),
        (
            judged(v.SUPPORTED, found="fits", unsaid={"parameters": [1e9, 2e9]}, **FITS),
            "; such a model fits under stage 0, so it is supported",
        ),
        (
            judged(v.REFUTED, TRIED, "rejected", **ACCEPTED),
            "; the library rejects it, so it is refuted (tried with the libraries).",
        ),
        (
            judged(v.SUPPORTED, TRIED, ["accepted", "accepted"], **ACCEPTED | PARSED | {"value": ["accepted"] * 2}),
            "; the library accepts such a configuration, so it is supported",
        ),
        (
            judged(v.REFUTED, MEASURED, evidence=("a", "b"), differs=("device CPU instead of T4",)),
            "(measured in 2 real CPU runs).",
        ),
        (judged(v.REFUTED, premise=True, quote=None), "One may expect “stage 2 takes 45 GB”; we find 42.7 GB instead"),
        (
            judged(v.REFUTED, READ, found=False, evidence=("P1", "Q7")),
            "we find otherwise, so it is refuted (read in the ZeRO paper and Q7).",
        ),
        (judged(v.SUPPORTED, VIRTUAL, evidence=("a",)), "(measured in 1 virtual run)."),
        (judged(v.SUPPORTED, VIRTUAL, evidence=("a", "b")), "(measured in 2 runs, not all real)."),
        (judged(v.SUPPORTED, READ, evidence=("P1", "Q7", "Q8")), "(read in 3 sources)."),
        (
            judged(v.CONTRADICTS, OWN),
            "its own numbers give 42.7 GB instead of 45 GB, so it contradicts itself.",
        ),
        (judged(v.CONSISTENT, OWN), "its own numbers give 42.7 GB, so it is consistent."),
        (judged(v.REFUTED, value={"low": 50e9, "high": 60e9}), "we find 42.7 GB instead of 50 GB to 60 GB, so"),
        (judged(v.INCONCLUSIVE), "what we find (42.7 GB) does not decide it, so it is inconclusive"),
        (judged(v.INCONCLUSIVE, found=None), "nothing that we have decides it"),
        (
            judged(v.INCONCLUSIVE, fails_under=("recipe fp32-adam",), **LEFT_OPEN),
            "it holds with mixed-adam and fails with fp32-adam, so it is inconclusive",
        ),
        (
            judged(v.INCONCLUSIVE, holds_under=("ranks 1",), fails_under=("micro_batch 2 or 8",)),
            "it holds with 1 rank and fails with 2 or 8 rows a pass, so it is inconclusive",
        ),
        (
            judged(v.INCONCLUSIVE, fails_under=("recipe fp32-adam", "ranks 8"), **LEFT_OPEN),
            "it leaves open the optimizer's recipe, so it is inconclusive",
        ),
        (
            judged(v.INCONCLUSIVE, **LEFT_OPEN),
            "it holds in some cases, and in others nothing decides, so it is inconclusive",
        ),
        (
            judged(v.NOT_TESTED, MEASURED, None, settle={"machine": "8 x H100", "command": "study sweep h100"}),
            "it is not tested here (it takes 8 x H100).",
        ),
        (judged(v.REFUTED, found=[90e9, 90e9], value=[45e9, 45e9]), "we find 90 GB instead of 45 GB, so"),
        (
            judged(v.REFUTED, TRIED, "bfloat16", **ACCEPTED | {"value": "fp32", "says": "its output is fp32"}),
            "“its output is fp32”; we find “bfloat16”, so it is refuted",
        ),
        (
            judged(v.SUPPORTED, document="pages", where="DeepSpeed, post of 8 March 2021 (commit 1), table 2"),
            "DeepSpeed (post) says “stage 2",
        ),
        (judged(v.SUPPORTED, premise=True, quote="45 GB"), "Document 000 may imply “stage 2 takes 45 GB”;"),
        (judged(v.SUPPORTED, document="P1", title="ZeRO: Memory (2020)"), "The paper ZeRO says “stage 2"),
        (judged(v.SUPPORTED, document="pages", where="DeepSpeed, post, table 2"), "DeepSpeed (post) says “stage 2"),
    ],
)
def test_a_claim_begins_with_a_sentence(verdict, sentence):
    """The sentence has the claim, the finding and the basis, in human units."""
    assert sentence in words.plainly(verdict)
    assert words.plainly(verdict).endswith(".")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (4.273e10, "bytes", "42.7 GB"),
        ([1.2e11, 1.88e9], "bytes", "120 GB, 1.88 GB"),
        (3.2e10, "bytes per second", "32 GB/s"),
        (16, "bytes a parameter", "16 bytes a parameter"),
        (42.7, "GB", "42.7 GB"),
        ([0.95, 0.78], "of ZeRO-0's speed", "95, 78 % of ZeRO-0's speed"),
        (0.125, "share saved", "12.5 % saved"),
        (13, "of 20 steps taken", "13 of 20 steps taken"),
        (5e8, "elements", "500 million elements"),
        ([1e5, 1e9], "elements", "100,000, 1 billion elements"),
        (2.5e16, "FLOP/s", "25 PFLOP/s"),
        (2.532e-6, "times the weights", "less than 0.0001 times the weights"),
        (True, "", "yes"),
        (float("inf"), "GPUs", "never GPUs"),
    ],
)
def test_numbers_are_in_units_that_people_use(value, unit, text):
    assert words.with_unit(value, unit) == text


def test_lines_are_short_and_lists_are_cut():
    unsaid = {"recipe": ["mixed-adam", "fp32-adam"]}
    cases = tuple(f"case {n}" for n in range(9))
    verdict = judged(
        v.INCONCLUSIVE, MEASURED, evidence=RUNS, differs=RUNS, holds_under=cases, unsaid=unsaid, quote="45 GB"
    )
    lines = words.lines(verdict)
    assert max(map(len, lines)) <= words.WIDTH
    for line in (
        "quote       “45 GB”",
        "left open   recipe: mixed-adam or fp32-adam",
        "holds with  case 0; case 1; case 2; case 3 ... and 5 more (--json)",
        "evidence    28 runs: run0, run1, run2, run3 ... and 24 more (--json)",
        "differs     run0; run1; run2; run3 ... and 24 more (--json)",
    ):
        assert line in lines


# --- how many ------------------------------------------------------------------------------------------------------


def row(word: str, basis: str, number: int, **more) -> dict:
    about = {
        "claim": f"X-{number}",
        "document": "libraries",
        "title": "A title",
        "premise": False,
        "contradiction": None,
    }
    return about | {"verdict": word, "basis": basis} | more


ROWS = [row(v.SUPPORTED, MEASURED, 1), row(v.NOT_TESTED, MEASURED, 2), row(v.REFUTED, PREDICTED, 3)]
ROWS += [row(v.CONTRADICTS, OWN, 4, contradiction="tokens"), row(v.CONTRADICTS, OWN, 5, contradiction="tokens")]
ROWS += [row(v.INCONCLUSIVE, OWN, 6), row(v.REFUTED, READ, 7, premise=True)]


def test_headlines_say_what_rests_on_real_runs():
    """Untested claims have no basis, a contradiction counts once, and premises do not count."""
    assert claims.sentence(pd.DataFrame(ROWS)) == (
        "Of 3 claims about the world: **1 supported**, **1 refuted**, **1 not tested here**. The verdicts rest on "
        "**real runs (1)** and formulas (1). 2 more were compared with their document's own numbers: "
        "**1 inconclusive**, **1 contradicts itself**. 1 premise of our own is not counted."
    )
    assert claims.sentence(pd.DataFrame()) == ""


def test_the_summary_fits_a_hundred_columns(monkeypatch, capsys):
    """It fits even if every number has two digits and a claim has long words."""
    verdicts = [judged(word, basis, premise=False) for word in v.VERDICTS for basis in model.BASES]
    monkeypatch.setattr(ledger, "row", lambda _: dict(ROWS[0]))
    results._summary(verdicts)
    results.show([results._row(verdict) for verdict in verdicts])
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 100


# --- for a stranger ------------------------------------------------------------------------------------------------


def test_every_check_is_listed_with_its_arguments_and_an_example():
    entries = catalogue.entries(files.read_all())
    assert {entry.name for entry in entries} >= {"arithmetic", "states_bytes", "ratio", "default", "reproduction"}
    for entry in entries:
        lines = catalogue.lines(entry)
        assert entry.example, entry.name
        assert len(lines[1].strip()) > 20, f"{entry.name} has no docstring"
        assert not [line for line in lines if line.endswith("anything")], entry.name
        shown = {line.split()[0] for line in lines if line.startswith("    ")}
        assert shown >= set(argument_model(entry.function).model_fields) - set(catalogue.GIVEN), entry.name


def test_arguments_are_told_in_plain_words(capsys):
    results.claims(("states_bytes", "peak_bytes"), checks=True)
    out = capsys.readouterr().out
    for line in (
        'states_bytes   (check = "theory", with quantity = "states_bytes"; basis: predicted; finds bytes)',
        "    stage       a whole number",
        "    parameters  a number, in parameters, optional",
        '    recipe      a text (recipes below), "mixed-adam" if not given',
        "    arm            a text (arms below)",
    ):
        assert line in out.splitlines()
    assert "\narms: single, ddp, zero1" in out
    assert "traffic_ratio  " not in out


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e9, "1e+09"),
        (7.5e9, "7.5e+09"),
        (0.05, "0.05"),
        (16, "16"),
        (True, "true"),
        ({"arm": ["ddp"], "where": {}}, '{ arm = ["ddp"], where = {} }'),
    ],
)
def test_examples_are_toml(value, text):
    assert catalogue.toml(value) == text


def test_the_claims_file_of_the_guide_is_valid(tmp_path):
    """Its three claims have the verdicts that the guide says."""
    guide = (ROOT / "CONTRIBUTING.md").read_text().split("## How to write a claims file")[1]
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(re.findall(r"^    (.*)$", guide, re.MULTILINE)))
    first, second, third = ledger.judge_all(files.read_all(path), Runs(()))
    assert (first.verdict, first.holds_under) == (v.INCONCLUSIVE, ("recipe mixed-adam",))
    assert (second.verdict, third.verdict) == (v.CONSISTENT, v.NOT_TESTED)
