"""What a check finds, and the only place where a verdict comes from: the finding, compared with what is claimed."""

import math
from dataclasses import dataclass

from study.claims.arguments import is_number
from study.claims.model import OWN

SUPPORTED, REFUTED, UNDERSTATED = "supported", "refuted", "understated"
INCONCLUSIVE, NOT_TESTED = "inconclusive", "not tested here"
CONSISTENT, CONTRADICTS = "consistent", "contradicts itself"  # instead of the first two, by a document's own numbers
VERDICTS = (SUPPORTED, REFUTED, UNDERSTATED, INCONCLUSIVE, NOT_TESTED, CONSISTENT, CONTRADICTS)
HOLDS, FAILS = (SUPPORTED, UNDERSTATED, CONSISTENT), (REFUTED, CONTRADICTS)
WORST_FIRST = (*FAILS, NOT_TESTED, INCONCLUSIVE, UNDERSTATED, SUPPORTED, CONSISTENT)


@dataclass(frozen=True)
class Finding:
    """What a check found: a number with its interval, a text, or yes or no. None if nothing, with the reason."""

    value: object
    working: str
    interval: tuple[float, float] | None = None
    evidence: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    without: str = INCONCLUSIVE  # the verdict if nothing was found
    missing: str = ""
    instead_of: object = None  # what to compare with, if that is not the claim's value
    basis: str = ""  # what it rests on, if that is not what checks of its kind rest on
    sentence: str = ""  # of the source, verbatim


def allowed(value: float | tuple[float, float], relation: str, tolerance: float) -> tuple[float, float]:
    """The interval in which the true value is if the claim holds, with the tolerance in the claim's favour."""
    least, most = value if isinstance(value, tuple) else (value, value)
    low = -math.inf if relation in ("at_most", "below") else least - tolerance * abs(least)
    high = math.inf if relation in ("at_least", "above") else most + tolerance * abs(most)
    return low, high


def verdict(finding: Finding, claimed, relation: str, tolerance: float, better: str | None = None) -> str:
    """Supported if the claim allows the whole interval, refuted if it allows none of it.

    If all of it is on the better side of what the claim allows, the claim is understated. What is said to be up to a
    value has to reach it in the best case.
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
    # Floats that were computed in two ways may differ in their last digits.
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
    """The verdict on a claim that leaves something open: the same in all cases, or none.

    What is said to be up to a value is said of the best case.
    """
    if relation == "up_to":
        return max(verdicts, key=(REFUTED, NOT_TESTED, INCONCLUSIVE, SUPPORTED, UNDERSTATED).index)
    different = set(verdicts)
    if len(different) == 1:
        return verdicts[0]
    return SUPPORTED if different <= {SUPPORTED, UNDERSTATED} else INCONCLUSIVE


def in_words_of(basis: str, verdict: str) -> str:
    """A document's own numbers show whether it is consistent, not whether it is true of the world."""
    own = {SUPPORTED: CONSISTENT, UNDERSTATED: CONTRADICTS, REFUTED: CONTRADICTS}
    return own.get(verdict, verdict) if basis == OWN else verdict
