"""Compares a user's runs with the numbers that claims name: they agree, they differ, or there are no such runs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from study.ledger.evidence import OfRuns, Value
from study.ledger.texts import Claim
from study.records.runs import Run

AGREES, DIFFERS, NO_RUNS = ANSWERS = "agree", "differ", "need other runs"


@dataclass(frozen=True)
class Compared:
    """A number of a claim, and the same of other runs."""

    claim: str
    evidence: OfRuns
    value: Value

    @property
    def answer(self) -> str:
        if self.value is None:
            return NO_RUNS
        return AGREES if self.evidence.agrees(self.value) else DIFFERS

    def shown(self) -> dict:
        about = {"claim": self.claim, "evidence": self.evidence.what}
        return about | {"committed": self.evidence.value, "yours": self.value, "answer": self.answer}


def compared(claims: Iterable[Claim], runs: Sequence[Run]) -> list[Compared]:
    return list(_compared(claims, runs))


def _compared(claims: Iterable[Claim], runs: Sequence[Run]) -> Iterator[Compared]:
    for claim in claims:
        for each in claim.evidence:
            if isinstance(each, OfRuns):
                try:
                    value = each.computed(runs)
                except ValueError:  # they disagree among themselves
                    value = "several"
                yield Compared(claim.id, each, value)
