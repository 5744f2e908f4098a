"""How certain a verdict is, in the four words of GRADE, with its reasons. It is computed, never typed.

It starts from what the verdict rests on, and goes down one step for each reason to doubt. GRADE is the scale of
evidence in medicine (Guyatt and others, BMJ 336, 2008). Only decided verdicts have a certainty.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from study.io.numbers import is_number
from study.ledger.verdict import FAILS, HOLDS, MEASURED, OWN, PREDICTED, READ, TRIED, VIRTUAL

if TYPE_CHECKING:
    from study.ledger.judging import Verdict

LEVELS = ("very low", "low", "moderate", "high")
HIGH, MODERATE, LOW = 3, 2, 1
START = {
    MEASURED: (HIGH, "real runs"),
    TRIED: (HIGH, "the library was asked"),
    OWN: (HIGH, "the document's own numbers"),
    VIRTUAL: (MODERATE, "counted on virtual ranks"),
    READ: (LOW, "a source says so"),
    PREDICTED: (LOW, "a formula says so"),
}
WIDE = 2  # the upper end of a wide interval over its lower end


@dataclass(frozen=True)
class Certainty:
    level: str
    reasons: tuple[str, ...]  # where it starts, and why it goes down

    def __str__(self) -> str:
        return f"{self.level} ({'; '.join(self.reasons)})"


def certainty(verdict: "Verdict") -> Certainty | None:
    """Return how certain a verdict is; None if it is open, or so by construction."""
    if verdict.verdict not in (*HOLDS, *FAILS) or verdict.is_by_construction:
        return None
    level, start = START[verdict.basis]
    doubts = tuple(_doubts(verdict))
    return Certainty(LEVELS[max(level - len(doubts), 0)], (start, *doubts))


def _doubts(verdict: "Verdict") -> Iterator[str]:
    claim = verdict.claim
    if others := [words for words in verdict.differs if not _is_known(words, verdict.basis)]:
        yield f"other conditions: {others[0]}"
    if verdict.basis == TRIED and claim.kind == "time":
        yield "a time of another machine"
    if any(_disagrees(verdict, other) for other in verdict.also):
        yield "other evidence disagrees"
    if _is_wide(verdict.interval):
        yield "a wide interval"
    if {*verdict.tolerances} - {verdict.verdict}:
        yield "half or twice the tolerance would change it"
    if claim.suspected:
        yield "chosen because a problem was suspected"
    if verdict.basis == READ and set(verdict.evidence) & {*claim.names, claim.document}:
        yield "the source is one that the document itself follows"


def _is_known(words: str, basis: str) -> bool:
    """Return whether a difference is no reason to doubt: our own instruments, or what the basis says already."""
    return "version of the instruments" in words or (basis == VIRTUAL and words.startswith("virtual ranks"))


def _disagrees(verdict: "Verdict", other: "Verdict") -> bool:
    """Return whether a further check decides the same sentence the other way round."""
    same = other.claimed == verdict.claimed
    return same and (other.verdict in FAILS) != (verdict.verdict in FAILS) and other.verdict in (*HOLDS, *FAILS)


def _is_wide(interval: object) -> bool:
    pairs = interval if isinstance(interval, list) else [interval]
    ends = [pair for pair in pairs if isinstance(pair, tuple) and all(map(is_number, pair))]
    return any(low <= 0 < high or (low > 0 and high > WIDE * low) for low, high in ends)
