"""Fit the constants of the model of a step's time that are marked as fitted in `study/theory/pace.toml`.

`python -m study.outside.fit` takes the rows whose role is "fit" (`reports/outside/sources.toml`), prints the constants
and how far rows lie from their predictions, and writes both with `--write`. Rows of the role "test" are not looked at.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy
from scipy.optimize import least_squares

from study.outside import rows, sources
from study.outside.rows import Row
from study.outside.setups import NoSetup, training_of
from study.text.tables import say
from study.theory import pace
from study.theory.pace import Pace
from study.theory.setup import Setup
from study.theory.steptime import Machine, step_time

SCALE = 0.1  # a row that is off by more than this pulls with its error, and no longer with its square
LOW, HIGH = 0.1, 0.9  # an interval of 80 %


@dataclass(frozen=True)
class Timed:
    """A row that measured a step, and what is predicted from."""

    row: Row
    setup: Setup
    machine: Machine

    @property
    def group(self) -> tuple[str, str]:
        """What is left out together: a source, its models apart, because each repeats them."""
        return self.row.source, str(self.row.model)


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
            machine = Machine(gpu=training.machine.gpu, gpus_per_node=training.machine.gpus_per_node)
            found.append(Timed(row, training.setup, machine))
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
    best = least_squares(
        lambda values: misses(fitted, with_values(values)),
        first,
        loss="soft_l1",
        f_scale=SCALE,
        diff_step=0.01,
        max_nfev=8,
    )
    return with_values(best.x)


def spread(fitted: Sequence[Timed], constants: Pace) -> tuple[float, float]:
    """Shares of a prediction, below and above, between which 80 % of rows lie; each group of rows counts the same."""
    of_group = defaultdict(list)
    for each, miss in zip(fitted, misses(fitted, constants), strict=True):
        of_group[each.group].append(1 - numpy.exp(-miss))
    shares = numpy.concatenate([numpy.array(each) for each in of_group.values()])
    weights = numpy.concatenate([numpy.full(len(each), 1 / len(each)) for each in of_group.values()])
    order = numpy.argsort(shares)
    place = numpy.cumsum(weights[order]) / weights.sum()
    low, high = numpy.interp([LOW, HIGH], place, shares[order])
    return float(high), float(-low)


def main() -> None:
    fitted = timed("fit")
    names = [name for name, constant in pace.origins().items() if constant["origin"].startswith("fitted")]
    constants = fit(fitted, names, pace.pace())
    low, high = spread(fitted, constants)
    miss = abs(numpy.exp(misses(fitted, constants)) - 1)
    for name in names:
        say(f"{name} = {getattr(constants, name):.4g}")
    say(f"spread: {low:.3f} below, {high:.3f} above")
    say(f"{len(fitted)} rows: median {numpy.median(miss):.1%}, 90 % within {numpy.quantile(miss, 0.9):.1%}")
    if "--write" in sys.argv:
        write({name: getattr(constants, name) for name in names})


def write(values: dict[str, float]) -> None:
    path = pace.FILE
    text = path.read_text()
    for name, value in values.items():
        text = re.sub(rf"(\[constant\.{name}\]\nvalue = )\S+", rf"\g<1>{value:.4g}", text)
    path.write_text(text)


if __name__ == "__main__":
    main()
