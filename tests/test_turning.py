"""Every claim's check can fail: for each there is made-up evidence that changes its verdict."""

import functools
import itertools
from dataclasses import replace

import pytest
from conftest import ROOT

from study.ledger import files, ledger, model
from study.ledger.arguments import as_list, is_number
from study.ledger.checks import KINDS
from study.ledger.evidence import Evidence, choose, gather
from study.ledger.model import Case, Check, Reference
from study.ledger.pairing import TRAINING
from study.ledger.record_checks import ANSWERS, REFUSED
from study.ledger.verdict import FAILS, HOLDS, MEASURED, Finding
from study.records import metrics
from study.records.runs import Run, load


def answering(case: Case, answers: list) -> Case:
    """A case whose check gives these answers: one per call, or all in one call."""
    if len(case.calls) == 1:
        return replace(case, function=lambda *_, **__: Finding(answers if len(answers) > 1 else answers[0], ""))
    in_turn = itertools.cycle(answers)
    return replace(case, function=lambda *_, **__: Finding(next(in_turn), ""))


def others(value, factor: float) -> list:
    """A finding that agrees with a value, and others that do not, in the units of the check."""
    if isinstance(value, bool | str):
        return [value, not value if isinstance(value, bool) else f"not {value}"]
    middle = sum(value) / 2 if isinstance(value, tuple) else value
    return [each * factor for each in (middle, middle + 1 + 9 * abs(middle), middle - 1 - 9 * abs(middle))]


def test_every_claim_could_fail(monkeypatch):
    """For each claim there are findings with which it holds, and findings with which it does not."""
    claims = files.read_all()
    monkeypatch.setattr(ledger, "_claimed", lambda check, _: 1.0 if isinstance(check.value, Reference) else check.value)
    for claim in claims:
        values = [1.0] if isinstance(claim.value, Reference) else as_list(claim.value)
        words = set()
        for which in (0, 1, -1):
            answers = [others(value, claim.factor)[which] for value in values]
            cases = [answering(case, answers) for case in claim.cases]
            with monkeypatch.context() as patch:
                patch.setattr(model.Claim, "cases", property(lambda _, cases=cases: cases))
                words.add(ledger.judge(claim.model_copy(update={"also": ()}), Evidence()).verdict)
        assert words & {"supported", "consistent"}, claim.id
        assert words & {"refuted", "contradicts itself"}, claim.id


# --- other records -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept() -> Evidence:
    """The records that come with the reports."""
    return gather(load(sorted((ROOT / "reports").glob("*/runs"))))


def side(check: str, call: dict) -> dict:
    """The runs that a check compares with others, by its arguments."""
    of = {"arm": call["arms"][1:]} if call.get("arms") else call.get("of") or {}
    return (call.get("where") or {}) | {name: value for name, value in of.items() if name != TRAINING}


DECIDES = {  # what is measured and decides a quantity that is computed
    "train_loss": "loss.train.-1",
    "eval_loss": "loss.eval.-1.eval_loss",
    "accuracy": "loss.eval.-1.accuracy",
    "perplexity": "loss.eval.-1.perplexity",
    "step_s": "time.step_s.*",
    "setup_s": "time.setup_s",
    "tokens_per_s": "observed.tokens_per_step",
    "samples_per_s": "observed.rows_per_step",
    "mfu": "time.flops_per_rank_and_step",
    "parameters": "observed.parameters",
    "held_parameters": "observed.held_parameters",
    "saved_bytes": "observed.saved.bytes",
}


def places(check: str, call: dict) -> list[str]:
    """The paths of the values in a record that a check reads, by its arguments. * is every item of a list or table."""
    training = (call.get("of") or {}).get(TRAINING)
    if check == "same_loss":
        curve = call.get("curve", "eval")
        if training is None:
            return [{"eval": "loss.eval.-1.eval_loss", "train": "loss.train.*"}[curve]]
        return [f"observed.runs.{training}." + {"eval": "evals.-1.eval_loss", "train": "losses.*"}[curve]]
    if check == "counted":
        kinds = call.get("collective", "all")
        field = "calls" if call.get("unit") == "calls" else "bytes"
        return [f"traffic.per_rank.*.{'*' if kind == 'all' else kind}.{field}" for kind in as_list(kinds)]
    if check == "equal":
        return [call["field"] + ".*"] if call["field"] == "loss.train" else [call["field"]]
    name = call["field"] if check == "observed" else call["quantity"]
    if training is not None:
        return [f"observed.runs.{training}.{metrics.OF_A_TRAINING[name]}"]
    if name == "states_bytes":
        return [f"memory.components.per_rank.*.at_peak.{state}" for state in metrics.STATES]
    return [DECIDES.get(name, name)]


def put(fields, path: list[str], new) -> None:
    """Replace the value at a path of a record by a function of the value."""
    name, *rest = path
    known = range(len(fields)) if isinstance(fields, list) else list(fields)
    for key in known if name == "*" else [int(name) if isinstance(fields, list) else name]:
        if isinstance(fields, list) and not -len(fields) <= key < len(fields):  # of a run without it
            continue
        if not rest:
            fields[key] = new(fields[key]) if isinstance(fields, list) else new(fields.get(key, 0))
        elif isinstance(fields, list) or key in fields:
            put(fields[key], rest, new)
        elif path[1:] == ["calls"]:  # a collective that was not called
            fields[key] = {"calls": new(0), "bytes": 4 * new(0), "bytes_by_dtype": {"float32": 4 * new(0)}}


def other(value, found, holds: bool, relation: str):
    """A finding that turns the verdict on a claim of this value."""
    if not is_number(value):
        return value if not holds else not value if isinstance(value, bool) else f"not {value}"
    within = {"at_least": 1000, "above": 1000, "at_most": 0.001, "below": 0.001}.get(relation, 1)
    beyond = {"at_least": 0, "above": 0, "up_to": 0}.get(relation, 10)
    return beyond * (value or found) if holds else within * (value or (relation == "above"))


def turned(claim: Check, check: str, call: dict, value, holds: bool, evidence: Evidence) -> dict[Run, Run]:
    """The runs that a call is about, each with the record that would turn the verdict."""
    function = KINDS[check].functions[""]
    found = function(evidence, claim, **call).value
    wanted = other(value, found, holds, claim.relation)
    runs = choose(evidence, claim, side(check, call), relative=True, statuses=(*ANSWERS, REFUSED)).runs

    def new(old, found):
        if check == "same_loss":  # of whether losses are equal, or lower
            return old * (0.5 if call.get("direction") and not holds else 2)
        if check == "equal":
            return 2 * old if is_number(old) else f"not {old}"
        if not is_number(old):
            return wanted
        if check == "order":  # the others become better than the first arm, or worse
            return old * (1000 if wanted != (call["quantity"] in metrics.HIGHER_IS_BETTER) else 0.001)
        number = old * wanted / found if found and old else wanted
        return round(number) if isinstance(old, int) else number

    changed, others = {}, tuple(run for run in evidence.runs if run not in runs)
    for run in runs:
        record = run.record
        alone = function(replace(evidence, runs=(*others, run)), claim, **call).value  # models and tasks differ
        of_run = functools.partial(new, found=alone or found)
        if check == "ran":
            record = record.model_copy(update={"status": "oom" if holds else value})
        for path in places(check, call) if check != "ran" else ():
            name, *rest = path.split(".")
            section = getattr(record, name)
            fields = section.model_dump(mode="json")
            put(fields, rest, of_run)
            record = record.model_copy(update={name: type(section).model_validate(fields)})
        changed[run] = replace(run, record=record)
    return changed


def test_other_records_turn_each_verdict_that_rests_on_records(kept):
    """Copies of the records in which only the values of the claim differ."""
    claims = [claim for claim in files.read_all() if claim.basis == MEASURED]
    alone = {"also": (), "until_tested": None}
    verdicts = [ledger.judge(claim.model_copy(update=alone), kept) for claim in claims]
    decided = [verdict for verdict in verdicts if verdict.verdict in HOLDS + FAILS]
    assert len(decided) >= 29
    for verdict in decided:
        claim, holds, evidence = verdict.claim, verdict.verdict in HOLDS, kept
        for case in claim.cases:
            values = verdict.claimed if len(case.calls) > 1 else [verdict.claimed]
            for call, value in zip(case.calls, values, strict=True):
                changed = turned(claim, claim.check, call, value, holds, evidence)
                evidence = replace(evidence, runs=tuple(changed.get(run, run) for run in evidence.runs))
        after = ledger.judge(claim, evidence)
        assert after.verdict in (FAILS if holds else HOLDS), (claim.id, verdict.verdict, after.verdict, after.working)
