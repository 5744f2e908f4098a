"""How wide the interval of a predicted time is: as wide as predictions of sources that were not fitted are off.

Rows of a source are off together, so each source weighs as much as any, however many rows it has. Large and small
models have intervals of their own: in small ones more of a step is Python and kernels that move bytes, which libraries
do in different ways. No row of the role "test" decides anything here.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import exp

import numpy

from study.outside.trainings import Timed
from study.theory.architecture import parameters
from study.theory.pace import LARGE, Pace
from study.theory.steptime import step_time

COVERAGE = 0.8
ENOUGH = 10  # rows of a source in the fit; one with fewer is left out, as no others decide what it decides
Off = dict[str, numpy.ndarray]  # by source: logarithms of how far its measurements are from predictions


def factor(off: Iterable[numpy.ndarray]) -> float:
    """Predictions divided and multiplied by it have COVERAGE of the rows between them; each source weighs the same."""
    off = list(off)
    together = numpy.concatenate(off)
    weights = numpy.concatenate([numpy.full(len(rows), 1 / len(rows)) for rows in off])
    order = numpy.argsort(together)
    return exp(together[order][numpy.searchsorted(numpy.cumsum(weights[order]), COVERAGE * len(off))])


def left_out(off: Off) -> dict[str, float]:
    """The share of a source's rows that are inside an interval of the other sources."""
    factors = {source: factor(rows for other, rows in off.items() if other != source) for source in off}
    return {source: float(numpy.mean(rows <= numpy.log(factors[source]))) for source, rows in off.items()}


def off_by_size(
    fitted: Sequence[Timed], others: Sequence[Timed], constants: Pace, fit: Callable[[Sequence[Timed]], Pace]
) -> dict[str, Off]:
    """Of large and of small models. A source that was fitted is predicted with constants that are fitted without it."""
    count = Counter(each.row.source for each in fitted)
    of_sources = defaultdict(list)
    for each in [*(each for each in fitted if count[each.row.source] >= ENOUGH), *others]:
        of_sources[each.row.source].append(each)
    sizes = {"large": defaultdict(list), "small": defaultdict(list)}
    for source, timed in of_sources.items():
        rest = [each for each in fitted if each.row.source != source]
        without = fit(rest) if len(rest) < len(fitted) else constants
        for each in timed:
            size = "large" if parameters(each.setup.model) >= LARGE else "small"
            sizes[size][source].append(_off(each, without))
    return {size: {source: numpy.array(rows) for source, rows in off.items()} for size, off in sizes.items()}


def _off(each: Timed, constants: Pace) -> float:
    """The logarithm of how far a measurement is from what is predicted, which is a range where the host is slow."""
    step, measured = step_time(each.setup, each.machine, constants), numpy.log(each.row.step_s)
    return float(max(numpy.log(step.least_s) - measured, measured - numpy.log(step.seconds)))
