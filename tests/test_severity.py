"""Planted falsehoods: each kind of evidence can be falsified, and a check that cannot fail is caught."""

import json
import math
from dataclasses import replace

import pytest
from test_ledger import CLAIMS, HEAD, PER_ARM, STATES, TOML, claims, judged, only, text  # noqa: F401

from study.ledger import (
    checks,
    committed,
    files,
    judging,
    ledger,
    predictions,
    severity,
    theory_checks,
)
from study.ledger.verdict import FAILS, HOLDS, INCONCLUSIVE, OWN, Finding
from study.probes import answers
from study.probes.answers import Answer
from study.records import evidence
from study.records.runs import load
from study.spec.settings import CACHE

CITED = {"check": '"cited"', "unit": '""', "tolerance": "0"}
MEMBER = {"check": '"tried"', "unit": '""', "tolerance": "0", "value": "true"}
MEMBER |= {"with": '{ what = "member", of = "transformers", name = "TrainingArguments" }'}


def of_source(about: str) -> str:
    return f'{{ source = "P1", where = "page 1", sentence = "It has 16 bytes.", {about} }}'


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "If the number 4 were 5 instead of 4 (we would find 2.5 tokens instead of 2 tokens), the document would"),
        ({"value": "3"}, "If the document said 2 tokens instead of 3 tokens, this would be consistent."),
        (STATES, "If parameters were 1.2 billion instead of 1 billion (we would find 19.2 GB instead of 16 GB"),
        (CITED | {"value": "16", "with": of_source("value = 16")}, "If P1 said 19 instead of 16 (we would find"),
        (
            CITED | {"value": "true", "with": of_source('agrees = true, says = "16"')},
            "If P1 said the opposite of “It has 16 bytes.”, this would be refuted.",
        ),
    ],
)
def test_a_falsehood_of_its_own_kind_turns_a_verdict(fields, words, claims):  # noqa: F811
    verdict = only(judged(claims(text(**fields))))
    assert verdict.turned_by.startswith(words)
    assert ledger.as_json(verdict)["turned_by"] == verdict.turned_by


@pytest.mark.parametrize("check", CLAIMS)
def test_falsified_records_turn_what_rests_on_them(check, claims, tmp_path):  # noqa: F811
    verdict = only(judged(claims(TOML[check]), *PER_ARM, folder=tmp_path))
    assert verdict.verdict == "supported"
    assert verdict.turned_by.endswith("this would be refuted.")


def test_a_library_may_answer_otherwise(claims, monkeypatch):  # noqa: F811
    monkeypatch.setattr(answers, "ask", lambda trials: [Answer(found=True, told="yes")] * len(trials))
    verdict = only(judged(claims(text(**MEMBER))))
    assert verdict.turned_by == "If the answer were no instead of yes, this would be refuted."


def test_a_parser_that_accepts_everything_shows_nothing(claims, monkeypatch):  # noqa: F811
    """To show that it accepts, it has to reject another config that has the same keys."""
    zero = {"zero_optimization": {"stage": 3, "overlap_comm": True}}
    trial = {"what": "deepspeed_config", "look": "accepted", "ranks": 1}
    monkeypatch.setattr(answers, "ask", lambda trials: [Answer(found="accepted", told="yes")] * len(trials))
    given = '{ what = "deepspeed_config", config = { zero_optimization = { stage = 3, overlap_comm = true } } }'
    toml = text(**MEMBER | {"with": given, "value": '"accepted"'})
    for config, turned in (({"fp16": 1}, False), (zero | {"fp16": 1}, True)):
        rejected = Answer(trial=trial | {"config": config}, found="rejected", told="no")
        monkeypatch.setattr(answers, "kept_answers", lambda rejected=rejected: [rejected])
        verdict = only(judged(claims(toml)))
        assert (bool(verdict.turned_by), verdict.is_by_construction) == (turned, not turned)


def test_a_check_that_cannot_fail_is_caught(claims, monkeypatch, tmp_path):  # noqa: F811
    """A formula or a check over records that always finds the same is no evidence."""

    def always(*, quantity: str = "", **_) -> Finding:
        return Finding(16e9, "whatever it gets")

    quantities = theory_checks.QUANTITIES | {"states_bytes": always}
    always.__signature__ = __import__("inspect").signature(theory_checks.QUANTITIES["states_bytes"])
    monkeypatch.setitem(checks.KINDS, "theory", replace(checks.THEORY, functions=quantities))
    (formula,) = judged(claims(text(**STATES)))

    def observes(about, claim, *, field: str, where: dict) -> Finding:
        return Finding(6e8, "whatever was recorded", evidence=tuple(run.name for run in about.runs))

    monkeypatch.setitem(checks.KINDS, "observed", replace(checks.KINDS["observed"], functions={"": observes}))
    (records,) = judged(claims(TOML["observed"]), *PER_ARM, folder=tmp_path)
    for verdict in (formula, records):
        assert (verdict.verdict, verdict.turned_by, verdict.is_by_construction) == ("supported", "", True)
        assert ledger.counted([ledger.row(verdict)]) == []


# --- the whole ledger ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def known():
    return {claim.id: claim for claim in files.read_all()}


def test_the_committed_verdicts_are_of_these_claims_and_checks(known):
    """Whoever changes a claim or a check renews the file, and so sees which verdicts change."""
    kept = committed.verdicts()
    assert kept.keys() == known.keys(), "study claims --keep"
    old = [name for name, claim in known.items() if kept[name].version not in versions(claim)]
    assert old == [], "study claims --keep"
    for name, entry in kept.items():
        is_decided = entry.verdict in (*HOLDS, *FAILS)
        marked = known[name].by_construction
        assert not marked or entry.turned_by == "", f"{name}: {entry.turned_by}, so it is not so by construction"
        assert is_decided or not entry.turned_by, name


def test_each_open_claim_about_the_world_says_what_would_decide_it(known):
    opened = {name for name, entry in committed.verdicts().items() if entry.verdict == INCONCLUSIVE}
    about_the_world = {name for name in opened if known[name].basis != OWN and not known[name].premise}
    assert len(about_the_world) > 50
    assert {name for name in about_the_world if not known[name].would_decide} == set()


def versions(claim) -> list[str]:
    return [committed.version(each) for each in (claim, claim.until_tested) if each]


@pytest.mark.slow
def test_every_decided_claim_is_turned_or_counted_nowhere(known):
    """The falsehoods of the whole ledger, sought again, and those that are committed."""
    loaded = load(sorted(evidence.ROOT.glob("reports/*/runs")))
    gathered = evidence.gather(loaded)
    for verdict in [judging.judge(claim, gathered) for claim in known.values()]:
        entry = committed.verdicts()[verdict.claim.id]
        assert (verdict.verdict, severity.turned_by(verdict, gathered)) == (entry.verdict, entry.turned_by)


def test_a_changed_verdict_is_named_with_its_reason(claims, monkeypatch):  # noqa: F811
    verdict = only(judged(claims()))
    entry = committed.Committed(version="0" * 8, verdict="contradicts itself", found="9", turned_by=None)
    same = entry.model_copy(update={"version": committed.version(verdict.claim)})
    for known_entry, reason in ((entry, "since the check or the claim changed"), (same, "by other answers or")):
        monkeypatch.setattr(committed, "verdicts", lambda known_entry=known_entry: {"X-1": known_entry})
        (words,) = committed.changes([verdict])
        assert words.startswith(f"1 verdicts differ from the committed ones {reason}")
        assert words.endswith("X-1 consistent (was contradicts itself)")
        counts, why = committed.differences([verdict])
        assert counts.endswith(": 1 consistent (committed: 0) and 0 contradicts itself (committed: 1).")
        assert why.startswith(f"Not as committed: 1 {reason}")


def test_a_version_is_of_the_check_and_its_arguments(claims):  # noqa: F811
    first, same, other, reworded = claims(
        text(),
        text(id='"X-2"'),
        text(id='"X-3"', **{"with": "{ times = [4], over = [2.0] }"}),
        text(id='"X-4"', says='"in other words"'),
    )
    versions = [committed.version(claim) for claim in (first, same, other, reworded)]
    assert versions[0] == versions[1] == versions[3] != versions[2]
    assert json.loads(json.dumps(versions)) == versions


def test_what_a_formula_finds_is_kept_for_the_same_code(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path))
    asked = []

    def formula(*, ranks: int) -> Finding:
        asked.append(ranks)
        return Finding(math.inf, "more ranks do not help", (1.0, 2.0), evidence=("P1",))

    for code, times in (("a", 1), ("a", 1), ("b", 2), ("a", 3)):
        predictions._kept.cache_clear()
        monkeypatch.setattr(predictions, "_code", lambda code=code: code)
        found = predictions.find(formula, {"ranks": 8})
        assert (found.value, found.interval, found.evidence) == (math.inf, (1.0, 2.0), ("P1",))
        predictions.keep()
        assert len(asked) == times, code
    predictions._kept.cache_clear()
