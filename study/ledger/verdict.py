"""Findings, and the only place where verdicts are made: by comparing a finding with the claimed value."""

import math
from dataclasses import dataclass

from study.io.numbers import is_number

# What a verdict may rest on.
MEASURED, VIRTUAL, TRIED = "measured", "virtual", "tried"
PREDICTED, OWN, READ = "predicted", "own numbers", "read"
NO_BASIS = "none"  # of what was not tested
BASES = (MEASURED, VIRTUAL, TRIED, PREDICTED, OWN, READ)

SUPPORTED, REFUTED, UNDERSTATED = "supported", "refuted", "understated"
INCONCLUSIVE, NOT_TESTED = "inconclusive", "not tested here"
CONSISTENT, CONTRADICTS = "consistent", "contradicts itself"  # replace the first two for a document's own numbers
VERDICTS = (SUPPORTED, REFUTED, UNDERSTATED, INCONCLUSIVE, NOT_TESTED, CONSISTENT, CONTRADICTS)
HOLDS, FAILS = (SUPPORTED, UNDERSTATED, CONSISTENT), (REFUTED, CONTRADICTS)
WORST_FIRST = (*FAILS, NOT_TESTED, INCONCLUSIVE, UNDERSTATED, SUPPORTED, CONSISTENT)
BEST_LAST = (REFUTED, NOT_TESTED, INCONCLUSIVE, SUPPORTED, UNDERSTATED)
OF_OWN_NUMBERS = {SUPPORTED: CONSISTENT, UNDERSTATED: CONTRADICTS, REFUTED: CONTRADICTS}
ROUNDING = 1e-9  # floats computed in two ways may differ in their last digits
SMALLEST = 1e-300  # keeps the rounding of 0 above 0


@dataclass(frozen=True)
class Finding:
    """What a check found: a number with its interval, a text, or yes or no. None if it found nothing."""

    value: object
    working: str
    interval: tuple[float, float] | None = None
    evidence: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    without: str = INCONCLUSIVE  # the verdict if nothing was found
    missing: str = ""
    instead_of: object = None  # the value to compare with, if not the claim's
    basis: str = ""  # what it rests on, if not on the basis of its kind of check
    sentence: str = ""  # of the source, verbatim


def allowed(value: float, relation: str, tolerance: float) -> tuple[float, float]:
    """Return the interval in which the truth lies if the claim holds. The tolerance is in the claim's favour."""
    low = value - tolerance * abs(value)
    high = value + tolerance * abs(value)
    if relation in ("at_most", "below"):
        low = -math.inf
    if relation in ("at_least", "above"):
        high = math.inf
    return low, high


def verdict(finding: Finding, claimed: object, relation: str, tolerance: float, better: str | None = None) -> str:
    """Compare a finding with the claimed value.

    Supported if the claim allows the whole interval of the finding, refuted if it allows none of it. If the whole
    interval is on the better side of what the claim allows, the claim is understated. A claim of "up to" a value is
    supported if the best case reaches the value.
    """
    if finding.value is None:
        return finding.without
    value = finding.value
    if is_number(value) and is_number(claimed):
        return _of_numbers(finding.interval or (value, value), claimed, relation, tolerance, better)
    if value == math.inf and isinstance(claimed, str):
        value = "never"
    same = type(value) is type(claimed) and value == claimed
    return SUPPORTED if same else REFUTED


def _of_numbers(span: tuple[float, float], claimed: float, relation: str, tolerance: float, better: str | None) -> str:
    low, high = allowed(claimed, relation, tolerance)
    least, most = span
    if relation == "up_to":
        least = most
        better = "higher"
    slack = ROUNDING * max(SMALLEST, abs(claimed))
    if relation in ("above", "below") and not tolerance:
        slack = -slack  # the limit itself is excluded
    if low - slack <= least and most <= high + slack:
        return SUPPORTED
    if most < low - slack:
        return UNDERSTATED if better == "lower" else REFUTED
    if least > high + slack:
        return UNDERSTATED if better == "higher" else REFUTED
    return INCONCLUSIVE


def over_cases(verdicts: list[str], rule: str) -> str:
    """Return the verdict on a claim that leaves something open: that of all cases if they agree, else inconclusive.

    A claim of "up to" a value is about the best case, and one that something can be done about "one" case.
    """
    if rule in ("up_to", "one"):
        return max(verdicts, key=BEST_LAST.index)
    different = set(verdicts)
    if len(different) == 1:
        return verdicts[0]
    return SUPPORTED if different <= {SUPPORTED, UNDERSTATED} else INCONCLUSIVE
