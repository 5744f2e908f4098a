"""Fits the constants of `study/predict/pace.toml` to the step times that others published.

`python tools/fit.py` prints them, `--write` stores them.

All rows decide but those of the newest set. The rows of a source share their errors, so a source of n rows counts as
much as n^0.8 single ones; and a row that is far off, because something about it is not known, counts little more than
one that is near. Each constant starts at what was published or measured of it, and is pulled back there.

The interval of a constant holds it with 80 %, if the sources are independent and the rows of a source are not (a
"sandwich" of derivatives with sources as clusters). The intervals of predictions are blind: each set from the second to
the newest but one is predicted with constants of the sets before it.
"""

import contextlib
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, fields, replace

import numpy
from scipy.optimize import least_squares

from study.core.errors import Stop
from study.core.text import say
from study.predict.outside.predicting import reading_of
from study.predict.outside.published import rows, set_number
from study.predict.pace import FILE, Pace, class_of, constants, pace
from study.predict.step_time import Hardware, step_time
from study.predict.training import Training

BY_CLASS = ("products", "attention")
SCALE = 0.05  # the loss of a row is quadratic up to this error, and linear beyond it
OF_A_SOURCE = 0.1  # a row weighs (rows of its source)^-0.1, and its square is summed
PULL = 0.25  # a constant that is off by this share costs as much as one row that is off by SCALE
# Constants that were measured are pulled more, but the GPUs whose software was new when the rows were measured.
MEASURED = dict.fromkeys(("moving", "link", "host_link", "separate_update"), 0.15) | dict.fromkeys(BY_CLASS, 0.1)
NEW = "newest"
STEP = 0.01  # of derivatives
COVERAGE = 0.8
SPREAD = 1.2816  # standard errors on either side that hold COVERAGE
INTERVALS = ("gpu_interval", "host_interval")
Name = tuple[str, str | None]  # of a constant, and its class of GPUs


@dataclass(frozen=True)
class Timed:
    """A published row whose step can be predicted."""

    source: str
    set: int
    seconds: float
    training: Training
    machine: Hardware


def timed() -> list[Timed]:
    known = []
    for row in rows():
        if row.step_s is None:
            continue
        with contextlib.suppress(Stop):
            reading = reading_of(row)
            if reading and reading.machine:
                known.append(Timed(row.source, set_number(row.set), row.step_s, reading.timed, reading.machine))
    return known


def names(of: Pace) -> list[Name]:
    found: list[Name] = []
    for field in fields(Pace):
        if field.name in BY_CLASS:
            found += [(field.name, gpus) for gpus in getattr(of, field.name)]
        elif field.name not in INTERVALS:
            found.append((field.name, None))
    return found


def value(of: Pace, name: Name) -> float:
    constant = getattr(of, name[0])
    return constant if name[1] is None else constant[name[1]]


def changed(of: Pace, values: dict[Name, float]) -> Pace:
    """Return constants of which some have other values."""
    new: dict = {kind: dict(getattr(of, kind)) for kind in BY_CLASS}
    for (name, gpus), each in values.items():
        if gpus is None:
            new[name] = each
        else:
            new[name][gpus] = each
    return replace(of, **new)


def misses(members: list[Timed], of: Pace) -> numpy.ndarray:
    """Return the logarithms of predicted over measured seconds."""
    return numpy.log([step_time(each.training, each.machine, of).seconds / each.seconds for each in members])


def fit(members: list[Timed], start: Pace) -> Pace:
    """Return the constants that bring predictions closest to the rows."""
    return fitted(members, start)[0]


def fitted(members: list[Timed], start: Pace) -> tuple[Pace, numpy.ndarray]:
    """Return the constants, and the standard errors of their logarithms."""
    free = names(start)
    sizes = Counter(each.source for each in members)
    weights = numpy.array([sizes[each.source] ** -OF_A_SOURCE for each in members])
    pulls = numpy.array([PULL if gpus == NEW else MEASURED.get(name, PULL) for name, gpus in free])

    def of(logarithms: numpy.ndarray) -> Pace:
        return changed(
            start, {name: value(start, name) * float(numpy.exp(x)) for name, x in zip(free, logarithms, strict=True)}
        )

    def losses(errors: numpy.ndarray) -> numpy.ndarray:
        return weights * numpy.sign(errors) * SCALE * numpy.sqrt(2 * (numpy.sqrt(1 + (errors / SCALE) ** 2) - 1))

    def residuals(logarithms: numpy.ndarray) -> numpy.ndarray:
        return numpy.concatenate([losses(misses(members, of(logarithms))), logarithms * SCALE / pulls])

    def slopes(logarithms: numpy.ndarray) -> numpy.ndarray:
        errors = misses(members, of(logarithms))
        found = numpy.zeros((len(members) + len(free), len(free)))
        for column, (kind, gpus) in enumerate(free):
            moved = logarithms.copy()
            moved[column] += STEP
            touched = [gpus in (None, class_of(kind, each.machine.gpu) if gpus else None) for each in members]
            after = errors.copy()
            after[touched] = misses(
                [each for each, is_touched in zip(members, touched, strict=True) if is_touched], of(moved)
            )
            found[: len(members), column] = (losses(after) - losses(errors)) / STEP
            found[len(members) + column, column] = SCALE / pulls[column]
        return found

    best = least_squares(residuals, numpy.zeros(len(free)), jac=slopes, max_nfev=8)
    rows = slice(len(members))
    by_source: dict[str, numpy.ndarray] = defaultdict(lambda: numpy.zeros(len(free)))
    for each, slope, residual in zip(members, best.jac[rows], best.fun[rows], strict=True):
        by_source[each.source] += slope * residual
    spread = sum(numpy.outer(each, each) for each in by_source.values())
    inverse = numpy.linalg.inv(best.jac.T @ best.jac)
    return of(best.x), numpy.sqrt(numpy.diag(inverse @ spread @ inverse))


def blind_intervals(members: list[Timed], start: Pace) -> dict[str, float]:
    """Return the factors that hold COVERAGE of the rows of sets that were not seen. Each source weighs the same."""
    newest = max(each.set for each in members)
    off: dict[str, list[tuple[float, float]]] = {name: [] for name in INTERVALS}
    for number in range(2, newest):
        of = fit([each for each in members if each.set < number], start)
        new = [each for each in members if each.set == number]
        sizes = Counter(each.source for each in new)
        for each, miss in zip(new, misses(new, of), strict=True):
            step = step_time(each.training, each.machine, of)
            by_gpu = step.high_s < step.seconds * of.host_interval
            off[INTERVALS[0] if by_gpu else INTERVALS[1]].append((abs(miss), 1 / sizes[each.source]))
    return {name: float(numpy.exp(quantile(found))) for name, found in off.items()}


def quantile(weighted: list[tuple[float, float]]) -> float:
    """Return the value below which COVERAGE of the weight lies."""
    values, weights = numpy.array(sorted(weighted)).T
    return float(numpy.interp(COVERAGE, numpy.cumsum(weights) / weights.sum(), values))


def main() -> None:
    start = replace(pace(), gpu_interval=1.5, host_interval=2.0)  # different, so that they tell who decides a step
    published = changed(start, {name: entry(name).get("start", value(start, name)) for name in names(start)})
    members = timed()
    known = [each for each in members if each.set < max(other.set for other in members)]
    best, errors = fitted(known, published)
    found = {name: (value(best, name), float(error)) for name, error in zip(names(best), errors, strict=True)}
    found |= {(name, None): (factor, 0.0) for name, factor in blind_intervals(members, published).items()}
    for name, (each, error) in found.items():
        ends = [each * float(numpy.exp(sign * SPREAD * error)) for sign in (-1, 1)]
        say(f"{'.'.join(filter(None, name)):32} {each:.4g}  ({ends[0]:.3g} to {ends[1]:.3g})")
        if "--write" in sys.argv:
            write(name, each, ends)


def entry(name: Name) -> dict:
    kind, gpus = name
    return constants()["constant"][kind] if gpus is None else constants()[kind][gpus]


def write(name: Name, best: float, ends: list[float]) -> None:
    """Replace a constant and its interval in the file."""
    table = f"constant.{name[0]}" if name[1] is None else ".".join(map(str, name))
    content = FILE.read_text()
    new = f"[{table}]\nvalue = {best:.4g}\ninterval = [{ends[0]:.3g}, {ends[1]:.3g}]"
    FILE.write_text(re.sub(rf"\[{re.escape(table)}\]\nvalue = .*\ninterval = .*", new, content))


if __name__ == "__main__":
    main()
