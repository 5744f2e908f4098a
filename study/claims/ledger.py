"""The ledger: claims and runs in, verdicts out.

A check computes every verdict. What is read in a source, and what follows from a document's own numbers, is counted
apart.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from study.claims import evidence as evidence_of_runs
from study.claims import probes
from study.claims.arguments import as_list, is_number
from study.claims.evidence import Evidence
from study.claims.model import BASES, MEASURED, OWN, PREDICTED, READ, VIRTUAL, Case, Check, Claim, Reference
from study.claims.probe_worker import ABSENT
from study.claims.verdict import (
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
from study.claims.verdict import verdict as compare
from study.errors import Stop
from study.records.runs import Runs
from study.text.numbers import count, quantity, short

SCALED = ("bytes", "parameters")  # units that are shown as GB or billions


@dataclass(frozen=True)
class Verdict:
    """What the check of a claim came to, and all that a reader needs to disagree with it."""

    claim: Claim
    verdict: str
    basis: str
    found: object  # in the claim's unit; a list where the claim has several values
    interval: object
    working: str
    evidence: tuple[str, ...]  # ids of runs, or of sources
    differs: tuple[str, ...]  # in which conditions the evidence is not the claim's
    missing: str  # what would settle it, or change it
    holds_under: tuple[str, ...] = ()  # values of what the document leaves open, if they decide
    fails_under: tuple[str, ...] = ()
    sentence: str = ""  # of the source, verbatim
    claimed: object = None  # the value, with the finding to which it refers, in the claim's unit
    also: tuple["Verdict", ...] = ()

    @property
    def rests_on(self) -> str | None:
        """The basis. What was not tested rests on nothing."""
        return None if self.verdict == NOT_TESTED else self.basis


def judge_all(claims: list[Claim], runs: Runs, evidence: Evidence | None = None) -> list[Verdict]:
    """A verdict for each claim. What the claims want tried is tried first, all together."""
    if evidence is None:
        evidence = evidence_of_runs.gather(runs)
    probes.prepare(claims)
    return [judge(claim, evidence) for claim in claims]


def judge(claim: Claim, evidence: Evidence) -> Verdict:
    """The verdict on a claim, with those of its further checks, which do not decide.

    What no run has tested, a weaker check may decide. What it takes to test it stays with the verdict.
    """
    verdict, weaker = _judge(claim, claim, evidence), claim.until_tested
    if verdict.verdict == NOT_TESTED and weaker:
        untested, verdict = verdict, _judge(weaker, weaker, evidence)
        verdict = replace(verdict, missing="; ".join(filter(None, (verdict.missing, untested.missing))))
    return replace(verdict, also=tuple(_judge(claim, check, evidence) for check in claim.also))


def _judge(claim: Claim, check: Check, evidence: Evidence) -> Verdict:
    """The verdict over all cases. What is shown is the first of them, and where the others differ."""
    try:
        claimed = _claimed(check, evidence)
        verdicts = [_in_case(claim, check, case, claimed, evidence) for case in check.cases]
    except Stop as stop:
        raise Stop(f"{claim.at}, claim {claim.id}, {check.check}: {stop.what}", stop.remedy) from None
    except (ArithmeticError, MemoryError) as error:
        what = f"{claim.at}, claim {claim.id}, {check.check}: its numbers cannot be computed with ({error!r:.200})"
        raise Stop(what, "give numbers of a training that there could be") from None
    if len(verdicts) == 1:
        return verdicts[0]
    words = [each.verdict for each in verdicts]
    verdict = over_cases(words, check.relation)
    shown = words.index(verdict) if verdict in words else 0
    values = [case.values for case in check.cases]
    holds, fails = (_under(values, [word in those for word in words]) for those in (HOLDS, FAILS))
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
    """The chosen cases in few words: values that make no difference stand together, or not at all."""
    if all(chosen):
        return ()
    texts = [{name: (_plain(value, name),) for name, value in case.items()} for case in cases]
    groups = [case for case, each in zip(texts, chosen, strict=True) if each]
    for name in cases[0]:
        merged: dict[str, dict] = {}
        for group in groups:
            others = str({key: values for key, values in group.items() if key != name})
            merged.setdefault(others, group | {name: ()})[name] += group[name]
        groups = list(merged.values())
    every = {name: {text for case in texts for text in case[name]} for name in cases[0]}
    decisive = [{name: each for name, each in group.items() if set(each) != every[name]} for group in groups]
    return tuple(", ".join(f"{name} {' or '.join(each)}" for name, each in group.items()) for group in decisive)


def _values(case: dict) -> str:
    return ", ".join(f"{name} {_plain(value, name)}" for name, value in case.items())


def _plain(value, name: str = "") -> str:
    """A value of an argument as people read it: arm zero3, rest_bytes 4 GB."""
    if isinstance(value, dict):
        return " ".join(f"{key} {_plain(each, key)}" for key, each in value.items())
    if isinstance(value, list):
        return f"[{', '.join(_plain(each, name) for each in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    return quantity(value, "bytes") if name.endswith("bytes") else count(value) if name == "parameters" else str(value)


def _claimed(check: Check, evidence: Evidence):
    """The claim's value, or the finding to which it refers in the claim's unit; None if that is not known."""
    if not isinstance(check.value, Reference):
        return check.value
    other = check.value.check
    result = _in_case(check.value.claim, other, other.written, None, evidence).found
    return result if result is None else _scaled(result, check.factor / other.factor)


def _in_case(claim: Claim, check: Check, case: Case, claimed, evidence: Evidence) -> Verdict:
    context = (evidence, claim) if check.basis == MEASURED else ()
    findings = [case.function(*context, **arguments) for arguments in case.calls]
    values = claimed if len(findings) > 1 else [claimed]
    if len(findings) == 1 and isinstance(claimed, list):
        values, findings = claimed, _elements(findings[0], len(claimed))
    findings = [_in_unit(finding, check.factor) for finding in findings]
    if isinstance(check.value, Reference) and claimed is None:
        verdicts = [NOT_TESTED]
    elif claimed is None:  # only the finding is wanted
        verdicts = [INCONCLUSIVE]
    else:
        verdicts = [_compared(check, finding, value) for finding, value in zip(findings, values, strict=True)]
    results, intervals = [finding.value for finding in findings], [finding.interval for finding in findings]
    missing = [finding.missing for finding in findings if finding.missing]
    if isinstance(check.value, Reference) and claimed is None:
        missing.append(f"{check.value}, which is not known")
    if NOT_TESTED in verdicts and claim.settle:
        missing.append(f"on {claim.settle.machine}: {claim.settle.command}")
    bases = {finding.basis for finding in findings}
    basis = VIRTUAL if VIRTUAL in bases else check.basis
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
        claimed=str(check.value) if isinstance(check.value, Reference) and claimed is None else claimed,
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
    """The verdict on one value. A value of a kind that the check never finds is a mistake in the claims file."""
    result, against = finding.value, value if finding.instead_of is None else finding.instead_of
    unlike = isinstance(result, bool) != isinstance(against, bool)
    known = result not in (None, ABSENT)
    if known and (unlike or (is_number(result) and isinstance(against, str) and against != "never")):
        raise Stop(f"value is {against!r}, and the check finds {result!r}", "give a value of that kind")
    return compare(finding, value, check.relation, check.tolerance, check.better)


def _unique(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(words))


# --- as data and as words ------------------------------------------------------------------------------------------


def in_units(value, unit: str) -> str:
    """A value, or several, with the unit: 148 GB."""
    if isinstance(value, (list, tuple)) and unit in SCALED:
        return ", ".join(in_units(each, unit) for each in value)
    return short(value) if value is None or isinstance(value, (bool, str)) else quantity(value, unit)


def without_unit(value, unit: str) -> str:
    """The same where the unit stands elsewhere."""
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
    """The rows that count: no premises, and of claims that are the same contradiction the worst."""
    worst_first = sorted(rows, key=lambda row: WORST_FIRST.index(row["verdict"]))
    of_group = {(row["document"], row["contradiction"] or row["claim"]): row["claim"] for row in worst_first[::-1]}
    return [row for row in rows if not row["premise"] and row["claim"] in of_group.values()]


def totals(rows: list[dict]) -> dict:
    """How many claims came to each verdict, and how many premises are not among them."""
    verdicts = [row["verdict"] for row in counted(rows)]
    counts = {name: verdicts.count(name) for name in VERDICTS}
    return {"claims": len(verdicts)} | counts | {"premises": sum(row["premise"] for row in rows)}


def by_document(rows: list[dict]) -> list[dict]:
    """How many claims of each document came to each verdict."""
    titles = {row["document"]: row["title"] for row in rows}
    of = {document: [row for row in rows if row["document"] == document] for document in titles}
    return [{"document": document, "title": titles[document]} | totals(of[document]) for document in titles]


def by_basis(rows: list[dict]) -> list[dict]:
    """How many of the verdicts rest on what."""
    counting = counted(rows)
    of = {basis: [row for row in counting if row["basis"] == basis] for basis in BASES}
    return [{"basis": basis} | totals(those) for basis, those in of.items() if those]


def bases(rows: list[dict]) -> dict:
    """How many verdicts rest on each basis but own numbers. What was not tested rests on nothing."""
    resting = [row["basis"] for row in counted(rows) if row["verdict"] != NOT_TESTED]
    return {basis: resting.count(basis) for basis in BASES if basis != OWN}


def as_json(verdict: Verdict) -> dict:
    """All of a verdict, as JSON can hold it."""
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
    """JSON has no infinity: no number is enough."""
    if isinstance(value, (list, tuple)):
        return [_json_value(each) for each in value]
    return "never" if isinstance(value, float) and not math.isfinite(value) else value


def otherwise(verdict: Verdict) -> str:
    """What would change the verdict."""
    claim = verdict.claim
    if verdict.holds_under or verdict.fails_under:
        return f"knowing what the document leaves open: {', '.join(claim.unsaid)}"
    if verdict.found is None or verdict.verdict in (NOT_TESTED, INCONCLUSIVE):
        return verdict.missing or "a finding that lies wholly inside or outside of what the claim allows"
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
