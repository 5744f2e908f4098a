"""Fit the constants of the model of a step's time that are marked as fitted in `study/theory/pace.toml`.

`python -m study.outside.fit` takes the rows whose role is "fit" (`reports/outside/sources.toml`), prints the constants
and how far the rows of a source lie from predictions that were fitted without it, and writes both with `--write`. Rows
of the role "test" decide no constant. How wide the interval is, all sources decide: those of the fit are too few, and
too like each other. Whether it is wide enough is shown source by source, with an interval that the others decide.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy
from scipy.optimize import least_squares

from study.outside import rows, sources
from study.outside.predict import machine_of
from study.outside.rows import Row
from study.outside.setups import NoSetup, training_of
from study.text.tables import say
from study.theory import pace
from study.theory.pace import Pace, ceiling_range
from study.theory.setup import Setup
from study.theory.steptime import Machine, step_time

SCALE = 0.1  # a row that is off by more than this pulls with its error, and no longer with its square
LOW, HIGH = 0.1, 0.9  # an interval of 80 %
DECIDES = 0.002  # rows decide a constant if a tenth less of it changes their predictions by this much on average
ENOUGH = 10  # rows of a source that shows how far predictions of an unseen source miss


@dataclass(frozen=True)
class Timed:
    """A row that measured a step, and what is predicted from."""

    row: Row
    setup: Setup
    machine: Machine


def timed(role: str) -> list[Timed]:
    """The rows of a role that have a step time and can be predicted."""
    found = []
    for row in rows.own():
        if sources.own()[row.source].role_of(row) != role or row.step_s is None:
            continue
        try:
            training = training_of(row)
        except NoSetup:
            continue
        if training.machine:
            found.append(Timed(row, training.setup, machine_of(training)))
    return found


def misses(fitted: Sequence[Timed], constants: Pace) -> numpy.ndarray:
    """The logarithm of predicted over measured seconds."""
    predicted = [step_time(each.setup, each.machine, constants).seconds for each in fitted]
    return numpy.log(numpy.array(predicted) / [each.row.step_s for each in fitted])


def fit(fitted: Sequence[Timed], names: Sequence[str], start: Pace) -> Pace:
    """The constants with which the rows lie closest to their predictions."""

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


def shares_off(fitted: Sequence[Timed], names: Sequence[str], constants: Pace) -> dict[str, numpy.ndarray]:
    """What was measured over what is predicted, less one, of the rows of each source with enough of them.

    A source that is fitted is predicted with constants that were fitted without it. Left out are GPUs whose ceiling is
    not certain, because that widens an interval by itself.
    """
    certain = [each for each in (*fitted, *timed("test")) if ceiling_range(each.machine.gpu) == (1, 1)]
    count, shares = Counter(each.row.source for each in certain), {}
    for source in (source for source, rows_of in count.items() if rows_of >= ENOUGH):
        others = [each for each in fitted if each.row.source != source]
        without = constants
        if len(others) < len(fitted):
            without = fit(others, identified(others, names, constants), constants)
        shares[source] = numpy.exp(-misses([each for each in certain if each.row.source == source], without)) - 1
    return shares


def spread(shares: Iterable[numpy.ndarray]) -> tuple[float, float]:
    """Shares of a prediction, below and above, between which 80 % of rows lie. Each source counts as much as any."""
    shares = list(shares)
    weights = numpy.concatenate([numpy.full(len(of_source), 1 / len(of_source)) for of_source in shares])
    together = numpy.concatenate(shares)
    order = numpy.argsort(together)
    place = numpy.cumsum(weights[order]) / len(shares)
    low, high = numpy.interp([LOW, HIGH], place, together[order])
    return float(-low), float(high)


def identified(fitted: Sequence[Timed], names: Sequence[str], constants: Pace) -> list[str]:
    """The constants that rows decide: predictions change with them."""
    now = misses(fitted, constants)
    changed = {name: replace(constants, **{name: 0.9 * getattr(constants, name)}) for name in names}
    return [name for name in names if abs(misses(fitted, changed[name]) - now).mean() > DECIDES]


def main() -> None:
    fitted = timed("fit")
    names = [name for name, constant in pace.origins().items() if constant["origin"].startswith("fitted")]
    constants = fit(fitted, names, pace.pace())
    shares = shares_off(fitted, names, constants)
    low, high = spread(shares.values())
    miss = abs(numpy.exp(misses(fitted, constants)) - 1)
    for name in names:
        say(f"{name} = {getattr(constants, name):.4g}")
    say(f"spread: {low:.3f} below, {high:.3f} above")
    for source, of_source in shares.items():
        under, over = spread(others for name, others in shares.items() if name != source)
        held = numpy.mean((of_source >= -under) & (of_source <= over))
        say(f"{source}: {held:.0%} of {len(of_source)} rows, in an interval of the other sources")
    say(f"{len(fitted)} rows: median {numpy.median(miss):.1%}, 90 % within {numpy.quantile(miss, 0.9):.1%}")
    if "--write" in sys.argv:
        write({name: getattr(constants, name) for name in names}, low, high)


def write(values: dict[str, float], low: float, high: float) -> None:
    path = pace.FILE
    text = re.sub(r"\nlow = \S+\nhigh = \S+", f"\nlow = {low:.3f}\nhigh = {high:.3f}", path.read_text())
    for name, value in values.items():
        text = re.sub(rf"(\[constant\.{name}\]\nvalue = )\S+", rf"\g<1>{value:.4g}", text)
    path.write_text(text)


if __name__ == "__main__":
    main()
