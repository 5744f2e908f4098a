"""The numbers that claims take from runs, beside the same of other runs."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from study.core.text import is_number
from study.ledger.evidence import Arithmetic, OfRuns, Value, distinct, middle, settings_and_models
from study.ledger.texts import Claim
from study.records.runs import Run
from study.sweeps import protocol

FORMULA = "the ZeRO paper's formula of model states, with other numbers"
AGREES, DIFFERS, NO_RUNS = "agree", "differ", "need other runs"


class Compared(NamedTuple):
    claim: str
    evidence: OfRuns
    values: list[Value]  # of each run or pair, from the least
    answer: str
    runs: list[str]  # for each value the folder of its run, or of the two runs of a ratio
    distinct: str  # settings and models of these
    alike: Sequence[str]  # the commands that make runs like most of them

    @property
    def value(self) -> Value:
        """Their median, or the text that all have."""
        return middle(self.values)


def compared(claims: Iterable[Claim], runs: Sequence[Run]) -> list[Compared]:
    """Each number that claims take from runs, beside the same of other runs, if there are such runs."""
    rows = []
    for claim in claims:
        for piece in claim.evidence:
            if isinstance(piece, OfRuns):
                valued = piece.values_with_runs(runs)
                if valued and is_number(valued[0][0]):
                    valued.sort(key=lambda each: each[0])
                values = [value for value, _ in valued]
                answer = AGREES if all(map(piece.agrees, values)) else DIFFERS
                of = [" over ".join(os.path.relpath(run.folder) for run in several) for _, several in valued]
                ways = Counter(tuple(dict.fromkeys(map(protocol.alike, several))) for _, several in valued)
                # A sweep makes what the other side of a ratio needs as well.
                alike = max(
                    ways, key=lambda way: (all(each.startswith("study sweep") for each in way), ways[way]), default=()
                )
                different = distinct(*settings_and_models(valued))
                rows.append(Compared(claim.id, piece, values, answer if valued else NO_RUNS, of, different, alike))
    return rows


def shared(claims: Sequence[Claim], runs: Sequence[Run]) -> dict[str, list[str]]:
    """The claims that rest on the same evidence, by what it is: it is one fact, however many claims it decides.

    Of runs: the runs of the same values, or some of them. Of a formula: with whatever numbers.
    """
    found: dict[str, set[str]] = defaultdict(set)
    rows = [row for row in compared(claims, runs) if row.runs]
    for row in rows:
        widest = max((each for each in rows if {*row.runs} <= {*each.runs}), key=lambda each: len(each.runs))
        found[widest.evidence.what].add(row.claim)
    for claim in claims:
        for piece in claim.evidence:
            if not isinstance(piece, OfRuns):
                found[FORMULA if isinstance(piece, Arithmetic) and piece.is_of_states else piece.what].add(claim.id)
    several = {what: sorted(ids) for what, ids in found.items() if len(ids) > 1}
    return dict(sorted(several.items(), key=lambda each: -len(each[1])))
