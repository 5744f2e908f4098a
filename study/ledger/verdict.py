"""Findings, and the only place where verdicts are made: by comparing a finding with the claimed value."""

import math
from dataclasses import dataclass

from study.ledger.arguments import is_number
from study.ledger.model import OWN

SUPPORTED, REFUTED, UNDERSTATED = "supported", "refuted", "understated"
INCONCLUSIVE, NOT_TESTED = "inconclusive", "not tested here"
CONSISTENT, CONTRADICTS = "consistent", "contradicts itself"  # replace the first two for a document's own numbers
VERDICTS = (SUPPORTED, REFUTED, UNDERSTATED, INCONCLUSIVE, NOT_TESTED, CONSISTENT, CONTRADICTS)
HOLDS, FAILS = (SUPPORTED, UNDERSTATED, CONSISTENT), (REFUTED, CONTRADICTS)
WORST_FIRST = (*FAILS, NOT_TESTED, INCONCLUSIVE, UNDERSTATED, SUPPORTED, CONSISTENT)


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


def allowed(value: float | tuple[float, float], relation: str, tolerance: float) -> tuple[float, float]:
    """The interval in which the true value lies if the claim holds. The tolerance is in the claim's favour."""
    least, most = value if isinstance(value, tuple) else (value, value)
    low = -math.inf if relation in ("at_most", "below") else least - tolerance * abs(least)
    high = math.inf if relation in ("at_least", "above") else most + tolerance * abs(most)
    return low, high


def verdict(finding: Finding, claimed, relation: str, tolerance: float, better: str | None = None) -> str:
    """Supported if the claim allows the whole interval of the finding, refuted if it allows none of it.

    If the whole interval is on the better side of what the claim allows, the claim is understated. A claim of "up to" a
    value is supported if the best case reaches the value.
    """
    claimed = finding.instead_of if finding.instead_of is not None else claimed
    value = "never" if finding.value == math.inf and isinstance(claimed, str) else finding.value
    if value is None:
        return finding.without
    if not (is_number(claimed) or isinstance(claimed, tuple)) or not is_number(value):
        return SUPPORTED if type(value) is type(claimed) and value == claimed else REFUTED
    low, high = allowed(claimed, relation, tolerance)
    least, most = finding.interval or (value, value)
    if relation == "up_to":
        least, better = most, "higher"
    # Floats computed in two ways may differ in their last digits.
    slack = 1e-9 * max(*map(abs, (low, high) if isinstance(claimed, tuple) else (claimed, 1e-300)))
    if relation in ("above", "below") and not tolerance:
        slack = -slack  # the limit itself is excluded
    if low - slack <= least and most <= high + slack:
        return SUPPORTED
    if most < low - slack:
        return UNDERSTATED if better == "lower" else REFUTED
    if least > high + slack:
        return UNDERSTATED if better == "higher" else REFUTED
    return INCONCLUSIVE


def together(verdicts: list[str]) -> str:
    """The verdict on a claim of several values: all must hold."""
    return min(verdicts, key=WORST_FIRST.index)


def over_cases(verdicts: list[str], relation: str) -> str:
    """The verdict on a claim that leaves something open: that of all cases if they agree, else inconclusive.

    A claim of "up to" a value is about the best case.
    """
    if relation == "up_to":
        return max(verdicts, key=(REFUTED, NOT_TESTED, INCONCLUSIVE, SUPPORTED, UNDERSTATED).index)
    different = set(verdicts)
    if len(different) == 1:
        return verdicts[0]
    return SUPPORTED if different <= {SUPPORTED, UNDERSTATED} else INCONCLUSIVE


def in_words_of(basis: str, verdict: str) -> str:
    """The verdict in words: a document's own numbers show whether it is consistent, not whether it is true."""
    own = {SUPPORTED: CONSISTENT, UNDERSTATED: CONTRADICTS, REFUTED: CONTRADICTS}
    return own.get(verdict, verdict) if basis == OWN else verdict
