"""Judges a claim: its check finds something in each case of what the document leaves open, and that is compared."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from study.errors import Stop
from study.io.numbers import count, is_number, quantity
from study.io.words import distinct
from study.ledger import predictions
from study.ledger.model import Case, Check, Claim, Reference
from study.ledger.verdict import (
    FAILS,
    HOLDS,
    INCONCLUSIVE,
    MEASURED,
    NOT_TESTED,
    OF_OWN_NUMBERS,
    OWN,
    PREDICTED,
    VIRTUAL,
    WORST_FIRST,
    Finding,
    over_cases,
)
from study.ledger.verdict import verdict as compare
from study.probes.worker import ABSENT
from study.records.evidence import Evidence

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
    def is_by_construction(self) -> bool:
        """Return whether a claim is decided by a check that cannot fail: it is shown, and counted nowhere."""
        return self.verdict in (*HOLDS, *FAILS) and self.claim.by_construction is not None

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
        holding_cases = sum(word in HOLDS for word in self.cases)
        return f"holds in {holding_cases} of {len(self.cases)} cases" if len(self.cases) > 1 else ""


def judge(claim: Claim, evidence: Evidence) -> Verdict:
    """Return the verdict on a claim, with those of its further checks. They decide only if the file says so.

    If no run has tested the claim, its weaker check may decide. The verdict still says what it takes to test the claim.
    """
    verdict = judge_check(claim, claim, evidence)
    weaker = claim.until_tested
    if verdict.verdict == NOT_TESTED and weaker:
        to_test = verdict.missing
        verdict = judge_check(weaker, weaker, evidence)
        verdict = replace(verdict, missing=distinct([verdict.missing, to_test]))
    also = tuple(judge_check(claim, check, evidence) for check in claim.also)
    deciding = {each.verdict for each, check in zip(also, claim.also, strict=True) if check.decides}
    if verdict.verdict != NOT_TESTED and deciding - {verdict.verdict, NOT_TESTED}:
        verdict = replace(verdict, verdict=INCONCLUSIVE)
    return replace(verdict, also=also)


def judge_check(claim: Claim, check: Check, evidence: Evidence, cases: list[Case] | None = None) -> Verdict:
    """Return the verdict over all cases: those of the check, unless others are given.

    What stops the check is told with the names of the claim and the check.
    """
    cases = check.cases if cases is None else cases
    name = f"{claim.at}, claim {claim.id}, {check.check}"
    try:
        claimed = _claimed(check, evidence)
        verdicts = [_in_case(claim, check, case, claimed, evidence) for case in cases]
    except Stop as stop:
        raise Stop(f"{name}: {stop.what}", stop.remedy) from None
    except (ArithmeticError, MemoryError) as error:
        what = f"{name}: it cannot compute with these numbers ({error!r:.200})"
        raise Stop(what, "give the numbers of a possible training") from None
    return verdicts[0] if len(verdicts) == 1 else _over_cases(check, cases, verdicts)


def _over_cases(check: Check, cases: list[Case], verdicts: list[Verdict]) -> Verdict:
    """Return the verdict of a claim that leaves something open: what is shown is of the first case that has it."""
    words = _each(verdicts, "verdict")
    rule = check.enough or check.relation
    verdict = over_cases(words, rule)
    shown = words.index(verdict) if verdict in words else 0
    values = [case.values for case in cases]
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
        working=distinct(working),
        evidence=_united(verdicts, "evidence"),
        differs=_united(verdicts, "differs"),
        missing=distinct(_each(verdicts, "missing")),
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
        working=distinct(_each(findings, "working")),
        evidence=_united(findings, "evidence"),
        differs=_united(findings, "differs"),
        missing=distinct(missing),
        sentence=distinct(_each(findings, "sentence"), " "),
        claimed=str(check.value) if claimed is None else claimed,
        cases=(_worst(basis, words),),
        tolerances=tuple(_worst(basis, [_compared(check, *pair, scale) for pair in pairs]) for scale in (HALF, TWICE)),
    )


def _worst(basis: str, words: list[str]) -> str:
    """Return the verdict on several values, all of which must hold.

    A document's own numbers show whether it is consistent, not whether it is true.
    """
    worst = min(words, key=WORST_FIRST.index)
    return OF_OWN_NUMBERS.get(worst, worst) if basis == OWN else worst


def _findings(claim: Claim, check: Check, case: Case, evidence: Evidence) -> list[Finding]:
    """Return what the calls of a check find, in the units of the check."""
    if check.basis == PREDICTED:
        return [predictions.find(case.function, arguments) for arguments in case.calls]
    if check.basis != MEASURED:
        return [case.function(**arguments) for arguments in case.calls]
    try:
        return [case.function(evidence, claim, **arguments) for arguments in case.calls]
    except ArithmeticError as error:  # a record may have a number that cannot be
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


# --- the cases of what a document leaves open ----------------------------------------------------------------------


def _under(cases: list[dict], chosen: list[bool]) -> tuple[str, ...]:
    """Return the chosen cases in few words: those that differ in one name are merged, irrelevant names left out."""
    if all(chosen):
        return ()
    texts: list[dict[str, tuple[str, ...]]]
    texts = [{name: (plain(value, name),) for name, value in case.items()} for case in cases]
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
    return ", ".join(f"{name} {plain(value, name)}" for name, value in case.items())


def plain(value: object, name: str = "") -> str:
    """Return the value of an argument as people read it: arm zero3, rest_bytes 4 GB."""
    if isinstance(value, dict):
        return " ".join(f"{key} {plain(each, key)}" for key, each in value.items())
    if isinstance(value, list):
        return f"[{', '.join(plain(each, name) for each in value)}]"
    if name.endswith(("bytes", "bytes_per_s")):
        return quantity(value, "bytes/s" if name.endswith("s_per_s") else "bytes")
    if isinstance(value, bool):
        return str(value).lower()
    return count(value) if name == "parameters" and is_number(value) else str(value)


def in_units(value: object, unit: str) -> str:
    """Return a value, or several, with the unit: 148 GB."""
    if isinstance(value, (list, tuple)) and unit in SCALED:
        return ", ".join(in_units(each, unit) for each in value)
    return quantity(value, unit if is_number(value) or isinstance(value, (list, tuple)) else "")
