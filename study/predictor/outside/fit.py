"""Fits the constants that `study/predictor/timing/pace.toml` marks as fitted, and the interval of predicted times.

`python -m study.predictor.outside.fit` fits the constants on the rows whose role is "fit"
(`reports/outside/sources.toml`). The width of the interval also uses the rows with the role "interval". It prints
both, and writes them with `--write`. Rows with the role "test" decide neither.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy
from scipy.optimize import least_squares

from study.io.tables import say
from study.predictor.outside import interval
from study.predictor.outside.trainings import Timed, timed
from study.predictor.timing import pace
from study.predictor.timing.pace import Pace
from study.predictor.timing.steptime import step_time

SCALE = 0.1  # the loss of a row is quadratic up to this error, and linear beyond it
DECIDES = 0.002  # rows decide a constant if reducing it by a tenth changes their predictions by more on average


def misses(fitted: Sequence[Timed], constants: Pace) -> numpy.ndarray:
    """The logarithm of predicted over measured seconds."""
    predicted = [step_time(each.setup, each.machine, constants).seconds for each in fitted]
    return numpy.log(numpy.array(predicted) / [each.row.step_s for each in fitted])


def fit(fitted: Sequence[Timed], names: Sequence[str], start: Pace) -> Pace:
    """The constants that bring predictions closest to the rows."""

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
    """The constants that rows decide, because predictions change with them."""
    now = misses(fitted, constants)
    changed = {name: replace(constants, **{name: 0.9 * getattr(constants, name)}) for name in names}
    return [name for name in names if abs(misses(fitted, changed[name]) - now).mean() > DECIDES]


def main() -> None:
    fitted = timed("fit")
    names = [name for name, constant in pace.origins().items() if constant["origin"].startswith("fitted")]
    constants = fit(fitted, names, pace.pace())

    def fit_to(some: Sequence[Timed]) -> Pace:
        return fit(some, identified(some, names, constants), constants)

    sizes = interval.off_by_size(fitted, timed("interval"), constants, fit_to)
    factors = {size: interval.factor(off.values()) for size, off in sizes.items()}
    miss = abs(numpy.exp(misses(fitted, constants)) - 1)
    for name in names:
        say(f"{name} = {getattr(constants, name):.4g}")
    say(f"{len(fitted)} rows: median {numpy.median(miss):.1%}, 90 % within {numpy.quantile(miss, 0.9):.1%}")
    for size, off in sizes.items():
        say(f"{size} models: the interval is the prediction divided and multiplied by {factors[size]:.3f}")
        for source, inside in interval.left_out(off).items():
            say(f"- {source}: {inside:.0%} of {len(off[source])} rows in an interval of the other sources")
    if "--write" in sys.argv:
        write({name: getattr(constants, name) for name in names}, factors)


def write(values: dict[str, float], factors: dict[str, float]) -> None:
    text = pace.FILE.read_text()
    for name, value in values.items():
        text = re.sub(rf"(\[constant\.{name}\]\nvalue = )\S+", rf"\g<1>{value:.4g}", text)
    for size, factor in factors.items():
        text = re.sub(rf"(\[interval\]\n(?:.+\n)*?{size} = )\S+", rf"\g<1>{factor:.3f}", text)
    pace.FILE.write_text(text)


if __name__ == "__main__":
    main()
