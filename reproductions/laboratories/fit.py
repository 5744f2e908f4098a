"""Fits the constants that `study/predictor/timing/pace.toml` marks as fitted, and the interval of predicted times.

`python reproductions/laboratories/fit.py` prints both, and writes them with `--write`. With `--keep`, the constants
stay as they are, and only the interval is new. CONTRIBUTING.md says which rows decide which of them.

The interval covers the errors on sources that were not used to fit. The errors of one source's rows are correlated, so
each source has the same weight, however many rows it has. Large and small models have separate intervals: small models
spend more of a step on Python and on kernels that move bytes, which differ between libraries.
"""

import contextlib
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy
from scipy.optimize import least_squares

from study.errors import Stop
from study.io.tables import say
from study.ledger.ratios import quantile
from study.predictor.outside.described import NotPredicted, Training, training_of
from study.predictor.outside.published import rows, set_number
from study.predictor.timing import pace
from study.predictor.timing.pace import LARGE, Pace
from study.predictor.timing.steptime import Machine, step_time

SCALE = 0.1  # the loss of a row is quadratic up to this error, and linear beyond it
DECIDES = 0.002  # rows decide a constant if reducing it by a tenth changes their predictions by more on average
COVERAGE = 0.8
ENOUGH = 10  # a fitted source with fewer rows is left out of the interval, as it alone decides some constants
Timed = tuple[Training, Machine]
Fit = Callable[[Sequence[Timed]], Pace]
Off = dict[str, list[float]]  # by source: logarithms of how far its measurements are from predictions


def timed(*, newest: bool) -> list[tuple[Training, Machine]]:
    """Return the rows of the newest set, or all others, that have a step time and can be predicted."""
    last = max(set_number(row.set) for row in rows())
    chosen = []
    for row in rows():
        if (set_number(row.set) == last) == newest and row.step_s is not None and row.config:
            with contextlib.suppress(NotPredicted, Stop):
                chosen.append(training_of(row))
    return [(training, training.machine) for training in chosen if training.machine]


def misses(fitted: Sequence[Timed], constants: Pace) -> numpy.ndarray:
    """Return the logarithm of predicted over measured seconds."""
    known = [(each, replace(machine, host_pace=machine.host_pace or constants.host_pace)) for each, machine in fitted]
    predicted = [step_time(training.setup, machine, constants).seconds for training, machine in known]
    return numpy.log(numpy.array(predicted) / [training.row.step_s for training, _ in fitted])


def fit(fitted: Sequence[Timed], names: Sequence[str], start: Pace) -> Pace:
    """Return the constants that bring predictions closest to the rows."""

    def with_values(logarithms: numpy.ndarray) -> Pace:
        return replace(start, **dict(zip(names, map(float, numpy.exp(logarithms)), strict=True)))

    first = numpy.log([getattr(start, name) for name in names])
    most = [0.0 if name.endswith("_share") else numpy.inf for name in names]  # logarithms: no share is above 1
    best = least_squares(
        lambda values: misses(fitted, with_values(values)),
        first,
        bounds=(-numpy.inf, most),
        loss="soft_l1",
        f_scale=SCALE,
        diff_step=0.01,
        max_nfev=8,
    )
    return with_values(best.x)


def identified(fitted: Sequence[Timed], names: Sequence[str], constants: Pace) -> list[str]:
    """Return the constants that rows decide, because predictions change with them."""
    now = misses(fitted, constants)
    changed = {name: replace(constants, **{name: 0.9 * getattr(constants, name)}) for name in names}
    return [name for name in names if abs(misses(fitted, changed[name]) - now).mean() > DECIDES]


def factor(off: Iterable[Sequence[float]]) -> float:
    """Return the factor such that COVERAGE of the rows of a further source are expected within it.

    The further source counts as one more, outside all others (split conformal prediction).
    """
    sources = list(off)
    share = COVERAGE * (len(sources) + 1) / len(sources)
    return float(numpy.exp(quantile(sources, min(share, 1.0))))


def left_out(off: Off) -> dict[str, float]:
    """Return for each source the share of its rows inside the interval that the other sources give."""
    factors = {source: factor(rows for other, rows in off.items() if other != source) for source in off}
    return {source: float(numpy.mean(numpy.array(rows) <= numpy.log(factors[source]))) for source, rows in off.items()}


def off_by_size(fitted: Sequence[Timed], others: Sequence[Timed], constants: Pace, fit_to: Fit) -> dict[str, Off]:
    """Return the errors of large and of small models. Fitted sources are predicted with constants fitted without them.

    `fit_to` fits the constants to other rows.
    """
    count = Counter(training.row.source for training, _ in fitted)
    by_source: dict[str, list[Timed]] = defaultdict(list)
    for each in [*(each for each in fitted if count[each[0].row.source] >= ENOUGH), *others]:
        by_source[each[0].row.source].append(each)
    sizes: dict[str, Off] = {"large": defaultdict(list), "small": defaultdict(list)}
    for source, members in by_source.items():
        rest = [each for each in fitted if each[0].row.source != source]
        without = fit_to(rest) if len(rest) < len(fitted) else constants
        for training, machine in members:
            size = "large" if training.setup.model.parameters >= LARGE else "small"
            sizes[size][source].append(_off(training, machine, without))
    return sizes


def _off(training: Training, machine: Machine, constants: Pace) -> float:
    """Return the logarithm of the error of a prediction, less what an unknown host explains."""
    step = step_time(training.setup, machine, constants)
    off = numpy.log((training.row.step_s or numpy.nan) / step.seconds)
    host = numpy.log((step.most_s if off > 0 else step.least_s) / step.seconds)
    return float(numpy.sqrt(max(0.0, off**2 - host**2)))


def main() -> None:
    fitted = timed(newest=False)
    names = [name for name, constant in pace.origins().items() if constant["origin"] == "fitted"]
    constants = pace.pace() if "--keep" in sys.argv else fit(fitted, names, pace.pace())

    def fit_to(rows: Sequence[Timed]) -> Pace:
        return fit(rows, identified(rows, names, constants), constants)

    sizes = off_by_size(fitted, timed(newest=True), constants, fit_to)
    factors = {size: factor(off.values()) for size, off in sizes.items()}
    miss = abs(numpy.exp(misses(fitted, constants)) - 1)
    for name in names:
        say(f"{name} = {getattr(constants, name):.4g}")
    say(f"{len(fitted)} rows: median {numpy.median(miss):.1%}, 90 % within {numpy.quantile(miss, 0.9):.1%}")
    for size, off in sizes.items():
        say(f"{size} models: the interval is the prediction divided and multiplied by {factors[size]:.3f}")
        for source, inside in left_out(off).items():
            say(f"- {source}: {inside:.0%} of {len(off[source])} rows in an interval of the other sources")
    if "--write" in sys.argv:
        write({name: getattr(constants, name) for name in names}, factors)


def write(values: dict[str, float], factors: dict[str, float]) -> None:
    text = pace.FILE.read_text()
    for name, value in values.items():
        text = re.sub(rf"(\[constant\.{name}\]\nvalue = )\S+", rf"\g<1>{value:.4g}", text)
    for size, width in factors.items():
        text = re.sub(rf"(\[interval\]\n(?:.+\n)*?{size} = )\S+", rf"\g<1>{width:.3f}", text)
    pace.FILE.write_text(text)


if __name__ == "__main__":
    main()
