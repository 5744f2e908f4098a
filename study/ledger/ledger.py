"""The ledger: claims and runs in, verdicts out.

A check computes every verdict. Verdicts that rest on a source, or on a document's own numbers, are counted separately.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from study.errors import Stop
from study.io.numbers import count, quantity, short
from study.ledger import evidence as evidence_of_runs
from study.ledger import probes
from study.ledger.arguments import as_list, is_number
from study.ledger.evidence import Evidence
from study.ledger.model import BASES, MEASURED, OWN, PREDICTED, READ, VIRTUAL, Case, Check, Claim, Reference
from study.ledger.probe_worker import ABSENT
from study.ledger.verdict import (
    FAILS,
    HOLDS,
    INCONCLUSIVE,
    NOT_TESTED,
    VERDICTS,
    WORST_FIRST,
    Finding,
    allowed,
    in_words_of,
    over_cases,
    together,
)
from study.ledger.verdict import verdict as compare
from study.records.runs import Runs

SCALED = ("bytes", "parameters")  # units that are shown as GB or billions


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim, with all that a reader needs to question it."""

    claim: Claim
    verdict: str
    basis: str
    found: object  # in the claim's unit; a list where the claim has several values
    interval: object
    working: str
    evidence: tuple[str, ...]  # ids of runs, or of sources
    differs: tuple[str, ...]  # in which conditions the evidence differs from the claim
    missing: str  # what would settle the claim, or change the verdict
    holds_under: tuple[str, ...] = ()  # values left open by the document, if they make a difference
    fails_under: tuple[str, ...] = ()
    sentence: str = ""  # of the source, verbatim
    claimed: object = None  # the value, or the finding that it refers to, in the claim's unit
    also: tuple["Verdict", ...] = ()

    @property
    def rests_on(self) -> str | None:
        """The basis; None if the claim was not tested."""
        return None if self.verdict == NOT_TESTED else self.basis


def judge_all(claims: list[Claim], runs: Runs, evidence: Evidence | None = None) -> list[Verdict]:
    """A verdict for each claim. All trials that the claims need run first, together."""
    if evidence is None:
        evidence = evidence_of_runs.gather(runs)
    probes.prepare(claims)
    return [judge(claim, evidence) for claim in claims]


def judge(claim: Claim, evidence: Evidence) -> Verdict:
    """The verdict on a claim, with the verdicts of its further checks, which do not decide.

    If no run has tested the claim, its weaker check may decide. The verdict still says what it takes to test the claim.
    """
    verdict, weaker = _judge(claim, claim, evidence), claim.until_tested
    if verdict.verdict == NOT_TESTED and weaker:
        to_test, verdict = verdict.missing, _judge(weaker, weaker, evidence)
        verdict = replace(verdict, missing="; ".join(filter(None, (verdict.missing, to_test))))
    return replace(verdict, also=tuple(_judge(claim, check, evidence) for check in claim.also))


def _judge(claim: Claim, check: Check, evidence: Evidence) -> Verdict:
    """The verdict over all cases, with the details of the first case that has this verdict."""
    try:
        claimed = _claimed(check, evidence)
        verdicts = [_in_case(claim, check, case, claimed, evidence) for case in check.cases]
    except Stop as stop:
        raise Stop(f"{claim.at}, claim {claim.id}, {check.check}: {stop.what}", stop.remedy) from None
    except (ArithmeticError, MemoryError) as error:
        what = f"{claim.at}, claim {claim.id}, {check.check}: it cannot compute with these numbers ({error!r:.200})"
        raise Stop(what, "give the numbers of a possible training") from None
    if len(verdicts) == 1:
        return verdicts[0]
    words = [each.verdict for each in verdicts]
    verdict = over_cases(words, check.relation)
    shown = words.index(verdict) if verdict in words else 0
    values = [case.values for case in check.cases]
    holds, fails = (_under(values, [word in outcome for word in words]) for outcome in (HOLDS, FAILS))
    working = [f"holds with {'; or '.join(holds)}"] if holds else []
    working += [f"does not hold with {'; or '.join(fails)}"] if fails else []
    working.append(f"with {_values(values[shown])}: {verdicts[shown].working}")
    numbers = [number for each in verdicts for number in (each.interval or [each.found]) if is_number(number)]
    return replace(
        verdicts[shown],
        verdict=verdict,
        basis=VIRTUAL if VIRTUAL in {each.basis for each in verdicts} else check.basis,
        interval=(min(numbers), max(numbers)) if numbers else verdicts[shown].interval,
        working="; ".join(working),
        evidence=_unique(name for each in verdicts for name in each.evidence),
        differs=_unique(difference for each in verdicts for difference in each.differs),
        missing="; ".join(_unique(each.missing for each in verdicts if each.missing)),
        holds_under=holds,
        fails_under=fails,
    )


def _under(cases: list[dict], chosen: list[bool]) -> tuple[str, ...]:
    """The chosen cases in few words: cases that differ in one name are merged, names that do not matter left out."""
    if all(chosen):
        return ()
    texts = [{name: (_plain(value, name),) for name, value in case.items()} for case in cases]
    groups = [case for case, is_chosen in zip(texts, chosen, strict=True) if is_chosen]
    for name in cases[0]:
        merged: dict[str, dict] = {}
        for group in groups:
            others = str({key: values for key, values in group.items() if key != name})
            merged.setdefault(others, group | {name: ()})[name] += group[name]
        groups = list(merged.values())
    every = {name: {text for case in texts for text in case[name]} for name in cases[0]}
    decisive = [{name: values for name, values in group.items() if set(values) != every[name]} for group in groups]
    return tuple(", ".join(f"{name} {' or '.join(values)}" for name, values in group.items()) for group in decisive)


def _values(case: dict) -> str:
    return ", ".join(f"{name} {_plain(value, name)}" for name, value in case.items())


def _plain(value, name: str = "") -> str:
    """The value of an argument as people read it: arm zero3, rest_bytes 4 GB."""
    if isinstance(value, dict):
        return " ".join(f"{key} {_plain(each, key)}" for key, each in value.items())
    if isinstance(value, list):
        return f"[{', '.join(_plain(each, name) for each in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    return quantity(value, "bytes") if name.endswith("bytes") else count(value) if name == "parameters" else str(value)


def _claimed(check: Check, evidence: Evidence):
    """The claim's value, or the finding that it refers to, in the claim's unit. None if that finding is not known."""
    if not isinstance(check.value, Reference):
        return check.value
    other = check.value.check
    result = _in_case(check.value.claim, other, other.written, None, evidence).found
    return _scaled(result, check.factor / other.factor)


def _in_case(claim: Claim, check: Check, case: Case, claimed, evidence: Evidence) -> Verdict:
    """The verdict in one case. Without a claimed value there are only the findings."""
    context = (evidence, claim) if check.basis == MEASURED else ()
    findings = [case.function(*context, **arguments) for arguments in case.calls]
    values = claimed if len(findings) > 1 else [claimed]
    if len(findings) == 1 and isinstance(claimed, list):
        values, findings = claimed, _elements(findings[0], len(claimed))
    findings = [_in_unit(finding, check.factor) for finding in findings]
    unknown = str(check.value) if isinstance(check.value, Reference) and claimed is None else ""
    if unknown:
        verdicts = [NOT_TESTED]
    elif claimed is None:
        verdicts = [INCONCLUSIVE]
    else:
        verdicts = [_compared(check, finding, value) for finding, value in zip(findings, values, strict=True)]
    results, intervals = [finding.value for finding in findings], [finding.interval for finding in findings]
    missing = [finding.missing for finding in findings if finding.missing]
    if unknown:
        missing.append(f"{unknown}, which is not known")
    if NOT_TESTED in verdicts and claim.settle:
        missing.append(f"on {claim.settle.machine}: {claim.settle.command}")
    basis = VIRTUAL if VIRTUAL in {finding.basis for finding in findings} else check.basis
    return Verdict(
        claim=claim,
        verdict=in_words_of(basis, together(verdicts)),
        basis=basis,
        found=results if len(results) > 1 else results[0],
        interval=intervals if len(results) > 1 else intervals[0],
        working="; ".join(_unique(finding.working for finding in findings)),
        evidence=_unique(name for finding in findings for name in finding.evidence),
        differs=_unique(words for finding in findings for words in finding.differs),
        missing="; ".join(_unique(missing)),
        sentence=" ".join(_unique(finding.sentence for finding in findings if finding.sentence)),
        claimed=unknown or claimed,
    )


def _in_unit(finding: Finding, factor: float) -> Finding:
    return replace(finding, value=_scaled(finding.value, factor), interval=_scaled(finding.interval, factor))


def _scaled(value, factor: float):
    if factor == 1 or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(_scaled(each, factor) for each in value)
    return value / factor if is_number(value) else value


def _elements(finding: Finding, count: int) -> list[Finding]:
    """A finding that is a list, element by element."""
    if finding.value is None:
        return [finding] * count
    if not (isinstance(finding.value, list) and len(finding.value) == count):
        what = f"value has {count} elements, and the check finds {finding.value!r}"
        raise Stop(what, "give lists to the check as well, or one value")
    return [replace(finding, value=each) for each in finding.value]


def _compared(check: Check, finding: Finding, value) -> str:
    """The verdict on one value. A Stop if the check never finds a value of this kind: the claims file is wrong."""
    result, against = finding.value, value if finding.instead_of is None else finding.instead_of
    unlike = isinstance(result, bool) != isinstance(against, bool)
    known = result not in (None, ABSENT)
    if known and (unlike or (is_number(result) and isinstance(against, str) and against != "never")):
        raise Stop(f"value is {against!r}, and the check finds {result!r}", "give a value of that kind")
    return compare(finding, value, check.relation, check.tolerance, check.better)


def _unique(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(words))


# --- verdicts as data ----------------------------------------------------------------------------------------------


def in_units(value, unit: str) -> str:
    """A value, or several, with the unit: 148 GB."""
    if isinstance(value, (list, tuple)) and unit in SCALED:
        return ", ".join(in_units(each, unit) for each in value)
    return short(value) if value is None or isinstance(value, (bool, str)) else quantity(value, unit)


def without_unit(value, unit: str) -> str:
    """A value, or several, for a place that names the unit elsewhere."""
    return in_units(value, unit if unit in SCALED else "")


def row(verdict: Verdict) -> dict:
    """A verdict as a flat row."""
    about = {"claim": verdict.claim.id} | _fields(verdict.claim, "document", "title", "where", "says", "quote")
    about |= _fields(verdict.claim, "premise", "contradiction")
    result = _fields(verdict, "verdict", "basis") | {"found": without_unit(verdict.found, verdict.claim.unit)}
    names, differs = ", ".join(verdict.evidence), "; ".join(verdict.differs)
    words = {"working": verdict.working, "evidence": names, "differs": differs, "missing": verdict.missing}
    return about | result | words


def _fields(thing, *names: str) -> dict:
    return {name: getattr(thing, name) for name in names}


def counted(rows: list[dict]) -> list[dict]:
    """The rows that count: no premises, and only the worst one of the claims that share a contradiction."""
    worst_first = sorted(rows, key=lambda row: WORST_FIRST.index(row["verdict"]))
    of_group = {(row["document"], row["contradiction"] or row["claim"]): row["claim"] for row in worst_first[::-1]}
    return [row for row in rows if not row["premise"] and row["claim"] in of_group.values()]


def totals(rows: list[dict]) -> dict:
    """How many claims have each verdict, and how many premises there are besides."""
    verdicts = [row["verdict"] for row in counted(rows)]
    counts = {name: verdicts.count(name) for name in VERDICTS}
    return {"claims": len(verdicts)} | counts | {"premises": sum(row["premise"] for row in rows)}


def by_document(rows: list[dict]) -> list[dict]:
    """How many claims of each document have each verdict."""
    titles = {row["document"]: row["title"] for row in rows}
    of = {document: [row for row in rows if row["document"] == document] for document in titles}
    return [{"document": document, "title": titles[document]} | totals(of[document]) for document in titles]


def by_basis(rows: list[dict]) -> list[dict]:
    """How many claims of each basis have each verdict."""
    counting = counted(rows)
    of = {basis: [row for row in counting if row["basis"] == basis] for basis in BASES}
    return [{"basis": basis} | totals(those) for basis, those in of.items() if those]


def bases(rows: list[dict]) -> dict:
    """How many verdicts rest on each basis, without own numbers and without claims that were not tested."""
    resting = [row["basis"] for row in counted(rows) if row["verdict"] != NOT_TESTED]
    return {basis: resting.count(basis) for basis in BASES if basis != OWN}


def as_json(verdict: Verdict) -> dict:
    """A verdict as JSON."""
    claim = verdict.claim
    about = _fields(claim, "id", "document", "quote", "where", "says", "kind") | {"value": _json_value(verdict.claimed)}
    about |= _fields(claim, "unit", "relation", "tolerance", "better", "premise", "contradiction", "unsaid")
    about |= {"fixed": str(claim.fixed)} | _fields(claim, "conditions", "reading", "check")
    also = [_result(other) | {"check": check.check} for other, check in zip(verdict.also, claim.also, strict=True)]
    return about | _result(verdict) | {"otherwise": otherwise(verdict), "also": also}


def _result(verdict: Verdict) -> dict:
    numbers = {"found": _json_value(verdict.found), "interval": _json_value(verdict.interval)}
    words = _fields(verdict, "working", "holds_under", "fails_under", "evidence", "sentence", "differs", "missing")
    return _fields(verdict, "verdict", "basis") | numbers | words


def _json_value(value):
    """A value for JSON, which has no infinity: there it is "never"."""
    if isinstance(value, (list, tuple)):
        return [_json_value(each) for each in value]
    return "never" if isinstance(value, float) and not math.isfinite(value) else value


def otherwise(verdict: Verdict) -> str:
    """What would change the verdict."""
    claim = verdict.claim
    if verdict.holds_under or verdict.fails_under:
        return f"knowing what the document leaves open: {', '.join(claim.unsaid)}"
    if verdict.found is None or verdict.verdict in (NOT_TESTED, INCONCLUSIVE):
        return verdict.missing or "a finding that lies entirely inside or outside of what the claim allows"
    values = as_list(verdict.claimed)
    if verdict.basis == READ and not any(is_number(value) or isinstance(value, tuple) for value in values):
        words = "a source that says otherwise"
    else:
        allows = ", ".join(_unique(_allowed(value, claim) for value in values))
        words = f"finding {allows}" if verdict.verdict in FAILS else f"finding anything but {allows}"
    if verdict.missing and verdict.basis == PREDICTED:
        words += f"; runs, which decide before a prediction: {verdict.missing}"
    if verdict.basis in (MEASURED, VIRTUAL) and verdict.differs:
        words += f"; runs that record it, on {claim.settle.machine}: {claim.settle.command}"
    return words


def _allowed(value, claim: Claim) -> str:
    """What a check may find if the claim holds."""
    if not (is_number(value) or isinstance(value, tuple)):
        return short(value)
    low, high = allowed(value, claim.relation, claim.tolerance)
    least, most = without_unit(low, claim.unit), without_unit(high, claim.unit)
    if math.isinf(low) or math.isinf(high):
        return f"{most} or less" if math.isinf(low) else f"{least} or more"
    return least if low == high else f"{least} to {most}"
