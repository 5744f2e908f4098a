"""Fits the constants of `study/predict/pace.toml` to step times: of others, and of this study's records of an H200.

`python tools/fit.py` prints them, and how far each source is from what others say of it.
`--write` stores them. `--intervals` takes the constants as they are stored, and gives intervals alone to be stored:
they depend on what limits a step, as `scored.py --write` has stored it with these constants.

All rows decide but those of the newest set, and at most 12 of a source, in equal steps. A source of n rows counts as
much as n^0.8 single ones; and a row that is far off, because something about it is not known, counts little more than
one that is near. Each constant starts at what was published or measured of it, and is pulled back there.

Then each source is left out once: constants are fitted to the other rows, and predict this one's. That fit is linear,
with the derivatives of the whole fit. The interval of a prediction is that of the next source (`next_source`), by what
limits a step; where it holds less than 80 % of the sources that were left out, it is widened until it does. The
interval of a constant holds it with 80 %, if sources are independent and their rows are not (a "sandwich" of
derivatives with sources as clusters).
"""

import argparse
import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy

from study.core.arms import ROOT
from study.core.errors import Stop
from study.core.gpus import GPUS, gpu_named
from study.core.text import say, show
from study.predict import calibration
from study.predict.calibration import Known
from study.predict.engines import engine_of
from study.predict.outside import scores
from study.predict.outside.predicting import reading_of
from study.predict.outside.published import rows, set_number
from study.predict.outside.scores import capped
from study.predict.pace import FILE, Pace, class_of, constants, pace
from study.predict.prediction import step_time
from study.predict.step_time import Hardware, kind_of_interval
from study.predict.training import Training
from study.records.metrics import steps_per_s
from study.records.metrics import value as value_of
from study.records.runs import load
from study.report.of_record import training_of

SCALE = 0.05  # the loss of a row is quadratic up to this error, and linear beyond it
OF_A_SOURCE = 0.1  # a row weighs (rows of its source)^-0.1, and its square is summed
PULL = 0.25  # a constant that is off by this share costs as much as one row that is off by SCALE
# Constants that were measured are pulled more, but the GPUs of which few rows are known.
MEASURED = dict.fromkeys(("moving", "link", "host_link", "separate_update", "launch", "python"), 0.15)
MEASURED |= dict.fromkeys(("products", "attention"), 0.1)
STEP = 0.01  # of derivatives
DECISIVE = 0.05  # a constant has the rows that it moves by this share of its own change, or more
STEPS = 6  # of the fit
LARGEST = 0.5  # change of a logarithm in one of them
COVERAGE = 0.8
WIDER = 1.01  # a step of widening
SPREAD = 1.2816  # standard errors on either side that hold COVERAGE
NOT_FITTED = ("interval", "width", "host_update")  # the last is a known machine's own: calibration.py
H200 = "this study, one H200"
Name = tuple[str, str | None]  # of a constant, and its class


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
    for run in load([ROOT / "reports" / "h200" / "runs"]).done:
        training, pace_s = training_of(run.record), steps_per_s(run.record)
        if training and pace_s and not run.record.is_virtual:  # a rank that runs alone waits for nobody
            known.append(Timed(H200, 0, 1 / pace_s, training, Hardware(gpu=GPUS["H200"], gpus_per_node=1, host="new")))
    return known


def names(of: Pace) -> list[Name]:
    found: list[Name] = []
    for field in fields(Pace):
        each = getattr(of, field.name)
        if field.name not in NOT_FITTED:
            found += [(field.name, kind) for kind in each] if isinstance(each, dict) else [(field.name, None)]
    return [name for name in found if entry(name).get("fitted", True)]


def value(of: Pace, name: Name) -> float:
    constant = getattr(of, name[0])
    return constant if name[1] is None else constant[name[1]]


def changed(of: Pace, values: dict[Name, float]) -> Pace:
    """Return constants of which some have other values."""
    new: dict = {}
    for (name, kind), each in values.items():
        if kind is None:
            new[name] = each
        else:
            new[name] = new.get(name, getattr(of, name)) | {kind: each}
    return replace(of, **new)


def errors(members: list[Timed], of: Pace) -> numpy.ndarray:
    """Return the logarithms of predicted over measured seconds."""
    return numpy.log(
        [step_time(each.training, replace(each.machine, pace=of)).seconds / each.seconds for each in members]
    )


def touches(name: Name, row: Timed) -> bool:
    """Return whether a constant may change the time of a row."""
    kind, of_class = name
    if kind in ("products", "attention"):
        return class_of(kind, row.machine.gpu) == of_class
    if kind == "launch":
        return (row.machine.host == "new") == (of_class == "new")
    return of_class in (None, "update", engine_of(row.training).python)


class Fit:
    """The constants that bring predictions closest to some rows, and what other rows would have made of them."""

    def __init__(self, members: list[Timed], start: Pace, at: Pace, steps: int = STEPS):
        self.members, self.start, self.names = members, start, names(start)
        pulls = [PULL if "width" in entry(each) else MEASURED.get(each[0], PULL) for each in self.names]
        self.pull = (SCALE / numpy.array(pulls)) ** 2
        # Of the constants over their starts.
        self.logarithms = numpy.log([value(at, each) / value(start, each) for each in self.names])
        for _ in range(steps):
            self._look()
            moved = self.without(numpy.ones(len(members), bool)) - self.logarithms
            self.logarithms = self.logarithms + moved.clip(-LARGEST, LARGEST)
        self._look()

    def constants(self, logarithms: numpy.ndarray) -> Pace:
        moved = zip(self.names, numpy.exp(logarithms), strict=True)
        return changed(self.start, {name: value(self.start, name) * float(factor) for name, factor in moved})

    def _look(self) -> None:
        of = self.constants(self.logarithms)
        self.errors = errors(self.members, of)
        self.slopes = numpy.zeros((len(self.members), len(self.names)))
        for column, name in enumerate(self.names):
            touched = numpy.array([touches(name, each) for each in self.members])
            moved = errors(
                [each for each, is_touched in zip(self.members, touched, strict=True) if is_touched],
                changed(of, {name: value(of, name) * numpy.exp(STEP)}),
            )
            self.slopes[touched, column] = (moved - self.errors[touched]) / STEP

    def weights(self, members: list[Timed], off: numpy.ndarray) -> numpy.ndarray:
        """Return what the square of each row's error counts."""
        sizes = Counter(each.source for each in members)
        of_source = numpy.array([sizes[each.source] ** (-2 * OF_A_SOURCE) for each in members])
        return of_source / numpy.sqrt(1 + (off / SCALE) ** 2)

    def without(self, kept: numpy.ndarray) -> numpy.ndarray:
        """Return the logarithms of the best constants for the kept rows alone, by the derivatives of all constants."""
        members = [each for each, is_kept in zip(self.members, kept, strict=True) if is_kept]
        slopes, best = self.slopes[kept], self.logarithms
        for _ in range(30):  # weights depend on errors
            off = self.errors[kept] + slopes @ (best - self.logarithms)
            weighted = slopes.T * self.weights(members, off)
            step = numpy.linalg.solve(weighted @ slopes + numpy.diag(self.pull), weighted @ off + self.pull * best)
            best = best - step
        return best

    def left_out(self) -> list[tuple[Timed, float, str]]:
        """Return each row with its error and its limit, by constants to which its source was not fitted."""
        found = []
        for source in dict.fromkeys(each.source for each in self.members):
            kept = numpy.array([each.source != source for each in self.members])
            of = self.constants(self.without(kept))
            for each in self.members:
                if each.source == source:
                    step = step_time(each.training, replace(each.machine, pace=of))
                    found.append((each, float(numpy.log(step.seconds / each.seconds)), kind_of_interval(step.limit)))
        return found

    def spread(self) -> numpy.ndarray:
        """Return the standard errors of the logarithms."""
        weighted = self.slopes.T * self.weights(self.members, self.errors)
        by_source: dict = defaultdict(lambda: numpy.zeros(len(self.names)))
        for each, slope, off in zip(self.members, weighted.T, self.errors, strict=True):
            by_source[each.source] = by_source[each.source] + slope * off
        inverse = numpy.linalg.inv(weighted @ self.slopes + numpy.diag(self.pull))
        return numpy.sqrt(numpy.diag(inverse @ sum(numpy.outer(each, each) for each in by_source.values()) @ inverse))


BySource = dict[str, list[float]]  # for each row of a source measured over predicted seconds


def by_source(pairs: Iterable[tuple[str, float]]) -> BySource:
    found: BySource = {}
    for source, over in pairs:
        found.setdefault(source, []).append(over)
    return found


def in_order(sources: Iterable[list[float]]) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Return all rows in order, with their votes and the numbers of their sources. A source has one vote."""
    rows = sorted((over, 1 / len(mine), number) for number, mine in enumerate(sources) for over in mine)
    overs, votes, numbers = numpy.array(rows).T
    return overs, votes, numbers


def middle(overs: numpy.ndarray, votes: numpy.ndarray, level: float) -> tuple[float, float]:
    """Return the ends of the middle share of votes, of rows in order."""
    place = numpy.cumsum(votes)
    first, last = numpy.searchsorted(place / place[-1], ((1 - level) / 2, (1 + level) / 2))
    return float(overs[first]), float(overs[min(len(overs) - 1, last)])


def held(sources: BySource, ends: tuple[float, float]) -> float:
    """Return the share of sources that ends hold. Of a source that they hold in part, this part counts."""
    return float(numpy.mean([numpy.mean([ends[0] <= over <= ends[1] for over in rows]) for rows in sources.values()]))


def next_source(sources: BySource) -> tuple[float, float]:
    """Return the ends that hold a source which has no vote with 80 %, as each in its turn shows it."""
    overs, votes, numbers = in_order(sources.values())  # once, and not for each source that is left out
    for level in numpy.arange(COVERAGE, 1, 0.01):
        shares = []
        for number, (source, mine) in enumerate(sources.items()):
            others = numbers != number
            shares.append(held({source: mine}, middle(overs[others], votes[others], level)))
        if numpy.mean(shares) >= COVERAGE:
            break
    return middle(overs, votes, level)


def widened(ends: tuple[float, float], sources: BySource) -> tuple[float, float]:
    """Return ends that hold 80 % of sources, in both directions by the same factor."""
    low, high = ends
    while held(sources, (low, high)) < COVERAGE:
        low, high = low / WIDER, high * WIDER
    return low, high


def first_of(limit: str) -> BySource:
    """Return the first predictions of the sources of frozen sets, of steps that are limited so."""
    times = [each for each in scores.numbers() if each.quantity == "time" and each.limit == limit]
    return by_source((each.source, each.measured / each.first) for each in times if each.first)


# --- machines whose own steps are known

MACHINES = ("h200", "h200-2", "h200-3", "h100")
REFERENCES = ("single", "zero2", "fsdp2", "zero2_cpu")


def on_machine(name: str) -> tuple[Known, list[calibration.Timed], list[calibration.Timed]]:
    """Return a machine as its references make it known, these, and its other steps."""
    kept = load([ROOT / "reports" / name / "runs"]).done
    timed = []
    for run in kept:
        training, seconds = training_of(run.record), value_of(run.record, "step_s")
        if training and seconds and not run.record.is_virtual and run.record.arm != "zero3_nvme":
            timed.append(calibration.Timed(str(run.record.arm), training, seconds))
    references = []
    for arm in REFERENCES:
        of_arm = [each for each in timed if each.arm == arm and each.training.batch.passes == 1]
        # As `study calibrate` has them; the second machine has no such step of zero2.
        of_arm.sort(key=lambda each: (each.training.model.name != "gpt2-medium", each.training.batch.rows))
        references += of_arm[:1]
    gpu = GPUS[gpu_named(kept[0].record.hardware.devices[0].name)]
    others = [each for each in timed if each not in references]
    return calibration.fitted(gpu, references), references, others


def known_hosts() -> BySource:
    """Return measured over predicted seconds of the steps of each machine that are no references."""
    return by_source(
        (name, each.seconds / step_time(each.training, calibration.hardware(known, 1)).seconds)
        for name in MACHINES
        for known, _, others in [on_machine(name)]
        for each in others
    )


def figures(name: str, off: Sequence[float], held_sources: float | None = None) -> dict:
    """Return how far predictions are from rows. `off`: logarithms of predicted over measured."""
    shares = numpy.abs(numpy.exp(off) - 1)
    return {
        "rows": name,
        "number": len(shares),
        "median error": f"{numpy.median(shares):.1%}",
        "within 35 %": f"{numpy.mean(shares <= 0.35):.0%}",
        "largest factor": f"{numpy.exp(numpy.max(numpy.abs(off))):.2f}",
        "sources held": "" if held_sources is None else f"{held_sources:.0%}",
    }


def main(write: bool, intervals: bool) -> None:
    now = pace()
    start = changed(now, {name: entry(name)["start"] for name in names(now)})
    known = [each for each in timed() if each.set < newest()]
    members = capped(known)
    fit = Fit(members, start, now, steps=0) if intervals else Fit(members, start, start)
    best, spread = fit.constants(fit.logarithms), fit.spread()
    decisive = (numpy.abs(fit.slopes) > DECISIVE).sum(axis=0)
    for name, error, count in zip(fit.names, spread, decisive, strict=True):
        middle = value(best, name)
        width = float(numpy.exp(SPREAD * error))
        store(*name, middle, (middle / width, middle * width), int(count), write)
    # --- the intervals, and how far a source is from what the others say of it
    off = fit.left_out()
    lines = [figures("all", [each for _, each, _ in off])]
    for kind in now.interval:
        first = first_of(kind)
        left_out = by_source((row.source, float(numpy.exp(-error))) for row, error, limit in off if limit == kind)
        ends = widened(next_source(first), left_out)
        middle = float(numpy.median([numpy.median(rows) for rows in first.values()]))
        store("interval", kind, middle, ends, sum(map(len, first.values())), write)
        of_kind = [error for _, error, limit in off if limit == kind]
        lines.append(figures(f"limited by {kind}", of_kind, held(left_out, ends)))
    hosts = known_hosts()
    known_off = [float(-numpy.log(over)) for rows in hosts.values() for over in rows]
    say(f"known hosts: {next_source(hosts)} (study/predict/calibration.py)")
    lines.append(figures("known hosts", known_off, held(hosts, calibration.INTERVAL)))
    lines.append(figures("stage 3", [each for row, each, _ in off if row.training.placement.stage == 3]))
    without = fit.constants(fit.without(numpy.array([each.source != H200 for each in members])))
    lines.append(figures(f"{H200}, all cells", list(errors([each for each in known if each.source == H200], without))))
    say("", f"{len(members)} rows of {len({each.source for each in members})} sources, each left out once:")
    show(lines)


def newest() -> int:
    return max(set_number(row.set) for row in rows())


def entry(name: Name) -> dict:
    kind, gpus = name
    return constants()["constant"][kind] if gpus is None else constants()[kind][gpus]


def store(name: str, kind: str | None, best: float, ends: tuple[float, float], rows: int, write: bool) -> None:
    """Print a constant with its interval, and if asked replace both in the file, and the number of its rows."""
    table = f"constant.{name}" if kind is None else f"{name}.{kind}"
    say(f"{table:32} {best:.4g}  ({ends[0]:.3g} to {ends[1]:.3g})")
    if write:
        old = rf"\[{re.escape(table)}\]\nvalue = .*\ninterval = .*\nrows = .*"
        new = f"[{table}]\nvalue = {best:.4g}\ninterval = [{ends[0]:.4g}, {ends[1]:.4g}]\nrows = {rows}"
        FILE.write_text(re.sub(old, new, FILE.read_text()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--intervals", action="store_true")
    main(**vars(parser.parse_args()))
