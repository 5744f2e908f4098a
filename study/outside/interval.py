"""How wide the interval of a predicted time is: as wide as predictions of sources that were not fitted are off.

Rows of a source are off together. So sources count, not rows: each weighs as much as any, and one more that nobody has
seen yet may be off by anything. If that one is a source like the others, its rows lie inside with a probability of at
least COVERAGE (hierarchical conformal prediction: Lee, Barber and Willett, arXiv 2306.06342). GPUs that constants were
fitted on have an interval of their own. No row of the role "test" decides anything here.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from math import exp

import numpy

from study.outside.trainings import Timed
from study.theory.pace import Pace
from study.theory.steptime import step_time

COVERAGE = 0.8
ENOUGH = 10  # rows of a source or of a GPU in the fit that show what was fitted on it


@dataclass(frozen=True)
class Width:
    """Predictions of some GPUs, divided and multiplied by the factor, are the ends of their interval."""

    factor: float
    sources: int
    rows: int

    @classmethod
    def of(cls, off: Collection[numpy.ndarray]) -> "Width":
        """From how far the rows of each source are off, in logarithms."""
        together = numpy.concatenate(list(off))
        weights = numpy.concatenate([numpy.full(len(rows), 1 / len(rows)) for rows in off]) / (len(off) + 1)
        order = numpy.argsort(together)
        reached = numpy.cumsum(weights[order]) >= COVERAGE - 1e-9
        if not reached.any():
            raise ValueError(f"{len(off)} sources are too few for an interval of {COVERAGE:.0%}")
        return cls(exp(together[order][reached.argmax()]), len(off), len(together))


def gpus_of(fitted: Sequence[Timed]) -> list[str]:
    """The GPUs that constants were fitted on."""
    count = Counter(each.machine.gpu for each in fitted)
    return sorted(gpu for gpu, rows in count.items() if rows >= ENOUGH)


def widths(
    fitted: Sequence[Timed],
    others: Sequence[Timed],
    constants: Pace,
    fit: Callable[[Sequence[Timed]], Pace],
) -> dict[str, Width]:
    """Of GPUs of the fit and of others, from rows of the fit and other rows. A source that was fitted is predicted
    with constants that are fitted without it; where it has few rows, it is left out, because no others decide what it
    decides."""
    count = Counter(each.row.source for each in fitted)
    off: dict[str, dict[str, numpy.ndarray]] = {"fitted": {}, "others": {}}
    for source, timed in _by_source([*(e for e in fitted if count[e.row.source] >= ENOUGH), *others]).items():
        rest = [each for each in fitted if each.row.source != source]
        without = fit(rest) if len(rest) < len(fitted) else constants
        for group, same in (("fitted", True), ("others", False)):
            rows = [each for each in timed if (each.machine.gpu in gpus_of(fitted)) == same]
            if rows:
                off[group][source] = numpy.array([_off(each, without) for each in rows])
    return {group: Width.of(list(of_group.values())) for group, of_group in off.items()}


def _by_source(timed: Sequence[Timed]) -> dict[str, list[Timed]]:
    found = defaultdict(list)
    for each in timed:
        found[each.row.source].append(each)
    return found


def _off(each: Timed, constants: Pace) -> float:
    """The logarithm of how far a measurement is from what is predicted, which is a range where the host is slow."""
    step = step_time(each.setup, each.machine, constants)
    measured = numpy.log(each.row.step_s)
    return float(max(numpy.log(step.least_s) - measured, measured - numpy.log(step.seconds)))


def as_toml(gpus: list[str], of_groups: dict[str, Width]) -> str:
    """The tables that `pace.toml` keeps."""
    lines = [f"[interval]\ngpus = {gpus}".replace("'", '"')]
    for group, width in of_groups.items():
        values = asdict(width) | {"factor": round(width.factor, 3)}
        lines += [f"[interval.{group}]", *(f"{name} = {value}" for name, value in values.items())]
    return "\n".join(lines) + "\n"
