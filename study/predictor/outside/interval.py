"""The width of the interval of a predicted time: it covers the errors on sources that were not used to fit.

The errors of one source's rows are correlated, so each source has the same weight, however many rows it has. Large and
small models have separate intervals: small models spend more of a step on Python and on kernels that move bytes, which
differ between libraries. Rows with the role "test" decide nothing here.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import exp

import numpy

from study.predictor.architecture import parameters
from study.predictor.outside.trainings import Timed
from study.predictor.timing.pace import LARGE, Pace
from study.predictor.timing.steptime import step_time

COVERAGE = 0.8
ENOUGH = 10  # a fitted source with fewer rows is left out here, as it alone decides some constants
Off = dict[str, numpy.ndarray]  # by source: logarithms of how far its measurements are from predictions


def factor(off: Iterable[numpy.ndarray]) -> float:
    """The factor such that COVERAGE of the rows lie between prediction / factor and prediction x factor."""
    off = list(off)
    together = numpy.concatenate(off)
    weights = numpy.concatenate([numpy.full(len(rows), 1 / len(rows)) for rows in off])
    order = numpy.argsort(together)
    return exp(together[order][numpy.searchsorted(numpy.cumsum(weights[order]), COVERAGE * len(off))])


def left_out(off: Off) -> dict[str, float]:
    """For each source, the share of its rows inside the interval that the other sources give."""
    factors = {source: factor(rows for other, rows in off.items() if other != source) for source in off}
    return {source: float(numpy.mean(rows <= numpy.log(factors[source]))) for source, rows in off.items()}


def off_by_size(
    fitted: Sequence[Timed], others: Sequence[Timed], constants: Pace, fit: Callable[[Sequence[Timed]], Pace]
) -> dict[str, Off]:
    """The errors of large and of small models. Fitted sources are predicted with constants fitted without them."""
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
    """The logarithm of the error of a prediction, which is a range if the host's speed matters."""
    step, measured = step_time(each.setup, each.machine, constants), numpy.log(each.row.step_s)
    return float(max(numpy.log(step.least_s) - measured, measured - numpy.log(step.seconds)))
