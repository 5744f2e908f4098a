"""The ledger: claims and runs in, verdicts out.

A check computes every verdict. Verdicts that rest on a source, or on a document's own numbers, are counted separately.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from study.errors import Stop
from study.io.numbers import count, quantity, short
from study.ledger import evidence as evidence_of_runs
from study.ledger import probes
from study.ledger.arguments import as_list, is_number
from study.ledger.evidence import Evidence
from study.ledger.model import Case, Check, Claim, Reference
from study.ledger.probe_worker import ABSENT
from study.ledger.verdict import (
    BASES,
    FAILS,
    HOLDS,
    INCONCLUSIVE,
    MEASURED,
    NOT_TESTED,
    OWN,
    PREDICTED,
    READ,
    TRIED,
    VERDICTS,
    VIRTUAL,
    WORST_FIRST,
    Finding,
    allowed,
    in_words_of,
    over_cases,
)
from study.ledger.verdict import verdict as compare
from study.records.runs import Runs

# Why a claim is open.
UNSAID, CONFLICTING = "depends on what is not said", "conflicting evidence"
UNCERTAIN, UNCHECKABLE = "too uncertain to say", "cannot be checked"
HALF, TWICE = 0.5, 2.0  # of the tolerance
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
    cases: tuple[str, ...] = ()  # the verdict in each case of what the document leaves open
    tolerances: tuple[str, ...] = ()  # the verdicts with half the tolerance, and with twice
    also: tuple["Verdict", ...] = ()

    @property
    def rests_on(self) -> str | None:
        """Return the basis; None if the claim was not tested."""
        return None if self.verdict == NOT_TESTED else self.basis

    @property
    def open_because(self) -> str | None:
        """Return why a claim is inconclusive. None for all other verdicts."""
        if self.verdict != INCONCLUSIVE:
            return None
        if self._disagrees("evidence"):
            return CONFLICTING
        if self._disagrees("reading"):
            return UNSAID
        return UNCHECKABLE if self.claim.check == "searched" else UNCERTAIN

    def _disagrees(self, kind: str) -> bool:
        """Return whether the claim both holds and fails: over its cases, and by further checks that decide so."""
        further = [each for each, check in zip(self.also, self.claim.also, strict=True) if check.decides == kind]
        if kind == "evidence" and not further:  # cases alone are no conflict of evidence
            return False
        words = {*self.cases, *_each(further, "verdict")}
        return bool(words & set(HOLDS) and words & set(FAILS))

    @property
    def holding(self) -> str:
        """Return in how many cases the claim holds; empty if nothing is left open."""
        held = sum(word in HOLDS for word in self.cases)
        return f"holds in {held} of {len(self.cases)} cases" if len(self.cases) > 1 else ""


def judge_all(claims: list[Claim], runs: Runs, evidence: Evidence | None = None) -> list[Verdict]:
    """Return a verdict for each claim. All trials that the claims need run first, together."""
    if evidence is None:
        evidence = evidence_of_runs.gather(runs)
    probes.prepare(trials(claims))
    return [judge(claim, evidence) for claim in claims]


def trials(claims: Iterable[Claim]) -> list[dict]:
    """Return the trials that these claims ask for."""
    tried = [check for claim in claims for check in claim.checks if check.basis == TRIED]
    cases = [case for check in tried for case in check.cases]
    return [trial for case in cases for trial in probes.trials_of(case.function, case.calls)]


def judge(claim: Claim, evidence: Evidence) -> Verdict:
    """Return the verdict on a claim, with those of its further checks. They decide only if the file says so.

    If no run has tested the claim, its weaker check may decide. The verdict still says what it takes to test the claim.
    """
    verdict = _judge(claim, claim, evidence)
    weaker = claim.until_tested
    if verdict.verdict == NOT_TESTED and weaker:
        to_test = verdict.missing
        verdict = _judge(weaker, weaker, evidence)
        verdict = replace(verdict, missing=_joined([verdict.missing, to_test]))
    also = tuple(_judge(claim, check, evidence) for check in claim.also)
    deciding = {each.verdict for each, check in zip(also, claim.also, strict=True) if check.decides}
    if verdict.verdict != NOT_TESTED and deciding - {verdict.verdict, NOT_TESTED}:
        verdict = replace(verdict, verdict=INCONCLUSIVE)
    return replace(verdict, also=also)


def _judge(claim: Claim, check: Check, evidence: Evidence) -> Verdict:
    """Return the verdict over all cases. What stops the check is told with the names of the claim and the check."""
    name = f"{claim.at}, claim {claim.id}, {check.check}"
    try:
        claimed = _claimed(check, evidence)
        verdicts = [_in_case(claim, check, case, claimed, evidence) for case in check.cases]
    except Stop as stop:
        raise Stop(f"{name}: {stop.what}", stop.remedy) from None
    except (ArithmeticError, MemoryError) as error:
        what = f"{name}: it cannot compute with these numbers ({error!r:.200})"
        raise Stop(what, "give the numbers of a possible training") from None
    return verdicts[0] if len(verdicts) == 1 else _over_cases(check, verdicts)


def _over_cases(check: Check, verdicts: list[Verdict]) -> Verdict:
    """Return the verdict of a claim that leaves something open: what is shown is of the first case that has it."""
    words = _each(verdicts, "verdict")
    rule = check.enough or check.relation
    verdict = over_cases(words, rule)
    shown = words.index(verdict) if verdict in words else 0
    values = [case.values for case in check.cases]
    holds = _under(values, [word in HOLDS for word in words])
    fails = _under(values, [word in FAILS for word in words])
    working = [
        f"holds with {'; or '.join(holds)}" if holds else "",
        f"does not hold with {'; or '.join(fails)}" if fails else "",
        f"with {_case_words(values[shown])}: {verdicts[shown].working}",
    ]
    return replace(
        verdicts[shown],
        verdict=verdict,
        basis=_basis(check, verdicts),
        interval=_covering(verdicts) or verdicts[shown].interval,
        working=_joined(working),
        evidence=_united(verdicts, "evidence"),
        differs=_united(verdicts, "differs"),
        missing=_joined(_each(verdicts, "missing")),
        holds_under=holds,
        fails_under=fails,
        cases=tuple(words),
        tolerances=tuple(over_cases([*each], rule) for each in zip(*_each(verdicts, "tolerances"), strict=True)),
    )


def _covering(verdicts: list[Verdict]) -> tuple[float, float] | None:
    """Return the interval that covers those of all cases; None if they found no number."""
    ends: list[object] = []
    for each in verdicts:
        ends += each.interval if isinstance(each.interval, (list, tuple)) else [each.found]
    numbers = list(filter(is_number, ends))
    return (min(numbers), max(numbers)) if numbers else None


def _basis(check: Check, results: Sequence[Finding | Verdict]) -> str:
    """Return what a verdict rests on: virtual ranks if any result does."""
    return VIRTUAL if VIRTUAL in _each(results, "basis") else check.basis


def _each(results: Sequence[Finding | Verdict], name: str) -> list:
    return [getattr(each, name) for each in results]


def _united(results: Sequence[Finding | Verdict], name: str) -> tuple[str, ...]:
    """Return the texts of all results, each once."""
    return tuple(dict.fromkeys(text for texts in _each(results, name) for text in texts))


# --- one case ------------------------------------------------------------------------------------------------------


def _claimed(check: Check, evidence: Evidence) -> object:
    """Return the claim's value, or the finding that it refers to, in the claim's unit. None if that is not known."""
    reference = check.value
    if not isinstance(reference, Reference):
        return reference
    findings = _findings(reference.claim, reference.check, reference.check.written, evidence)
    return _scaled(_one_or_all(_each(findings, "value")), check.factor)


def _in_case(claim: Claim, check: Check, case: Case, claimed: object, evidence: Evidence) -> Verdict:
    """Return the verdict in one case. What is claimed is unknown if the check that it refers to found nothing."""
    findings = _findings(claim, check, case, evidence)
    values = claimed if isinstance(claimed, list) else [claimed] * len(findings)
    if len(values) > len(findings):
        findings = _elements(findings[0], len(values))
    findings = [
        replace(each, value=_scaled(each.value, check.factor), interval=_scaled(each.interval, check.factor))
        for each in findings
    ]
    pairs = [*zip(values, findings, strict=True)]
    words = [_compared(check, *pair) for pair in pairs]
    missing = _each(findings, "missing")
    if claimed is None:
        missing.append(f"{check.value}, which is not known")
    if claim.settle and NOT_TESTED in words:
        missing.append(f"on {claim.settle.machine}: {claim.settle.command}")
    basis = _basis(check, findings)
    return Verdict(
        claim=claim,
        verdict=_worst(basis, words),
        basis=basis,
        found=_one_or_all(_each(findings, "value")),
        interval=_one_or_all(_each(findings, "interval")),
        working=_joined(_each(findings, "working")),
        evidence=_united(findings, "evidence"),
        differs=_united(findings, "differs"),
        missing=_joined(missing),
        sentence=_joined(_each(findings, "sentence"), " "),
        claimed=str(check.value) if claimed is None else claimed,
        cases=(_worst(basis, words),),
        tolerances=tuple(_worst(basis, [_compared(check, *pair, scale) for pair in pairs]) for scale in (HALF, TWICE)),
    )


def _worst(basis: str, words: list[str]) -> str:
    """Return the verdict on several values, all of which must hold."""
    return in_words_of(basis, min(words, key=WORST_FIRST.index))


def _findings(claim: Claim, check: Check, case: Case, evidence: Evidence) -> list[Finding]:
    """Return what the calls of a check find, in the units of the check."""
    if check.basis != MEASURED:
        return [case.function(**arguments) for arguments in case.calls]
    try:
        return [case.function(evidence, claim, **arguments) for arguments in case.calls]
    except ArithmeticError as error:  # a record that passed the audit may still have a number that cannot be
        working = f"the check cannot compute with these records ({error})"
        return [Finding(None, working, missing="records with possible numbers")] * len(case.calls)


def _compared(check: Check, claimed: object, finding: Finding, scale: float = 1) -> str:
    """Return the verdict on one value, with a multiple of the tolerance.

    Raise Stop if the check never finds a value of this kind.
    """
    if claimed is None:
        return NOT_TESTED
    against = claimed if finding.instead_of is None else finding.instead_of
    result = finding.value
    unlike = isinstance(result, bool) != isinstance(against, bool)
    number_for_text = is_number(result) and isinstance(against, str) and against != "never"
    if result not in (None, ABSENT) and (unlike or number_for_text):
        raise Stop(f"value is {against!r}, and the check finds {result!r}", "give a value of that kind")
    return compare(finding, against, check.relation, check.tolerance * scale, check.better)


def _elements(finding: Finding, number: int) -> list[Finding]:
    """Return a finding that is a list, element by element."""
    if finding.value is None:
        return [finding] * number
    if not isinstance(finding.value, list) or len(finding.value) != number:
        what = f"value has {number} elements, and the check finds {finding.value!r}"
        raise Stop(what, "give lists to the check as well, or one value")
    return [replace(finding, value=each) for each in finding.value]


def _scaled(value, factor: float):
    if isinstance(value, (list, tuple)):
        return type(value)(_scaled(each, factor) for each in value)
    return value / factor if is_number(value) and factor != 1 else value


def _one_or_all(values: list) -> object:
    return values if len(values) > 1 else values[0]


def _joined(words: Iterable[str], mark: str = "; ") -> str:
    return mark.join(dict.fromkeys(filter(None, words)))


# --- the cases of what a document leaves open ----------------------------------------------------------------------


def _under(cases: list[dict], chosen: list[bool]) -> tuple[str, ...]:
    """Return the chosen cases in few words: those that differ in one name are merged, irrelevant names left out."""
    if all(chosen):
        return ()
    texts: list[dict[str, tuple[str, ...]]]
    texts = [{name: (_plain(value, name),) for name, value in case.items()} for case in cases]
    groups = [case for case, is_chosen in zip(texts, chosen, strict=True) if is_chosen]
    for name in cases[0]:
        merged: dict[str, dict[str, tuple[str, ...]]] = {}
        for group in groups:
            others = str(group | {name: ()})
            merged.setdefault(others, group | {name: ()})[name] += group[name]
        groups = list(merged.values())
    every = {name: {case[name][0] for case in texts} for name in cases[0]}
    decisive = [{name: values for name, values in group.items() if set(values) != every[name]} for group in groups]
    return tuple(", ".join(f"{name} {' or '.join(values)}" for name, values in group.items()) for group in decisive)


def _case_words(case: dict) -> str:
    return ", ".join(f"{name} {_plain(value, name)}" for name, value in case.items())


def _plain(value: object, name: str = "") -> str:
    """Return the value of an argument as people read it: arm zero3, rest_bytes 4 GB."""
    if isinstance(value, dict):
        return " ".join(f"{key} {_plain(each, key)}" for key, each in value.items())
    if isinstance(value, list):
        return f"[{', '.join(_plain(each, name) for each in value)}]"
    if name.endswith("bytes"):
        return quantity(value, "bytes")
    if isinstance(value, bool):
        return str(value).lower()
    return count(value) if name == "parameters" and is_number(value) else str(value)


# --- verdicts as data ----------------------------------------------------------------------------------------------

OF_A_RESULT = ("working", "holds_under", "fails_under", "evidence", "sentence", "differs", "missing")


def in_units(value, unit: str) -> str:
    """Return a value, or several, with the unit: 148 GB."""
    if isinstance(value, (list, tuple)) and unit in SCALED:
        return ", ".join(in_units(each, unit) for each in value)
    return quantity(value, unit if is_number(value) or isinstance(value, (list, tuple)) else "")


def _without_unit(value, unit: str) -> str:
    """Return a value, or several, for a place that names the unit elsewhere."""
    return in_units(value, unit if unit in SCALED else "")


def row(verdict: Verdict) -> dict:
    """Return a verdict as a flat row."""
    claim = verdict.claim
    return {
        "claim": claim.id,
        **_fields(claim, "document", "title", "where", "says", "quote", "premise", "contradiction"),
        "by_construction": claim.by_construction is not None,
        **_fields(verdict, "verdict", "basis"),
        "found": _without_unit(verdict.found, claim.unit),
        "working": verdict.working,
        "evidence": ", ".join(verdict.evidence),
        "differs": "; ".join(verdict.differs),
        "missing": verdict.missing,
    }


def _fields(thing: object, *names: str) -> dict:
    return {name: getattr(thing, name) for name in names}


def once(rows: list[dict]) -> list[dict]:
    """Return one row of those that share a contradiction, also if they are of several documents, and all others."""
    chosen: dict[str, str] = {}
    for row in sorted(rows, key=lambda row: WORST_FIRST.index(row["verdict"])):
        chosen.setdefault(row["contradiction"] or row["claim"], row["claim"])
    return [row for row in rows if row["claim"] in chosen.values()]


def counted(rows: list[dict]) -> list[dict]:
    """Return the rows that count: no premises, nothing by construction, one of those that share a contradiction."""
    return [row for row in once(rows) if not row["premise"] and not row["by_construction"]]


def totals(rows: list[dict]) -> dict:
    """Return how many claims have each verdict, and how many premises there are besides."""
    verdicts = [row["verdict"] for row in counted(rows)]
    counts = {name: verdicts.count(name) for name in VERDICTS}
    return {"claims": len(verdicts)} | counts | {"premises": sum(row["premise"] for row in rows)}


def by_document(rows: list[dict]) -> list[dict]:
    """Return how many claims of each document have each verdict."""
    titles = {row["document"]: row["title"] for row in rows}
    groups = {document: [row for row in once(rows) if row["document"] == document] for document in titles}
    return [{"document": document, "title": titles[document]} | totals(groups[document]) for document in titles]


def by_basis(rows: list[dict]) -> list[dict]:
    """Return how many claims of each basis have each verdict."""
    groups = {basis: [row for row in counted(rows) if row["basis"] == basis] for basis in BASES}
    return [{"basis": basis} | totals(group) for basis, group in groups.items() if group]


def bases(rows: list[dict]) -> dict:
    """Return how many verdicts rest on each basis, without own numbers and without claims that were not tested."""
    resting = [row["basis"] for row in counted(rows) if row["verdict"] != NOT_TESTED]
    return {basis: resting.count(basis) for basis in BASES if basis != OWN}


def as_json(verdict: Verdict) -> dict:
    """Return a verdict as JSON."""
    claim = verdict.claim
    also = [_result(other) | {"check": check.check} for other, check in zip(verdict.also, claim.also, strict=True)]
    return {
        **_fields(claim, "id", "document", "quote", "where", "says", "kind"),
        "value": _json_value(verdict.claimed),
        **_fields(claim, "unit", "relation", "tolerance", "better", "premise", "contradiction", "unsaid"),
        **_fields(claim, "central", "suspected", "by_construction", "would_decide"),
        "fixed": str(claim.fixed),
        **_fields(claim, "conditions", "reading", "check"),
        **_result(verdict),
        **_fields(verdict, "open_because", "holding", "tolerances"),
        "otherwise": otherwise(verdict),
        "also": also,
    }


def _result(verdict: Verdict) -> dict:
    values = {name: _json_value(getattr(verdict, name)) for name in ("found", "interval")}
    return _fields(verdict, "verdict", "basis") | values | _fields(verdict, *OF_A_RESULT)


def _json_value(value: object) -> object:
    """Return a value for JSON, which has no infinity: there it is "never"."""
    if isinstance(value, (list, tuple)):
        return [_json_value(each) for each in value]
    return "never" if isinstance(value, float) and not math.isfinite(value) else value


def otherwise(verdict: Verdict) -> str:
    """Return what would change the verdict."""
    claim = verdict.claim
    if verdict.holds_under or verdict.fails_under:
        return f"knowing what the document leaves open: {', '.join(claim.unsaid)}"
    if verdict.found is None or verdict.verdict in (NOT_TESTED, INCONCLUSIVE):
        return verdict.missing or "a finding that lies entirely inside or outside of what the claim allows"
    values = as_list(verdict.claimed)
    if verdict.basis == READ and not any(is_number(value) or isinstance(value, tuple) for value in values):
        return "a source that says otherwise"
    allows = _joined((_allowed(value, claim) for value in values), ", ")
    words = f"finding {allows}" if verdict.verdict in FAILS else f"finding anything but {allows}"
    to_run = f"runs, which decide before a prediction: {verdict.missing}"
    return _joined([words, to_run if verdict.missing and verdict.basis == PREDICTED else ""])


def _allowed(value: object, claim: Claim) -> str:
    """Return what a check may find if the claim holds."""
    if not (is_number(value) or isinstance(value, tuple)):
        return short(value)
    low, high = allowed(value, claim.relation, claim.tolerance)
    least = _without_unit(low, claim.unit)
    most = _without_unit(high, claim.unit)
    if math.isinf(low):
        return f"{most} or less"
    if math.isinf(high):
        return f"{least} or more"
    return least if low == high else f"{least} to {most}"
