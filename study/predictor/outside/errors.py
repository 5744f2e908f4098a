"""Published rows beside their predictions: the errors row by row, by source, and over all sources."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from statistics import fmean, mean, median
from typing import get_args

from study.errors import Stop
from study.machine.gpus import GPUS, Gpu
from study.predictor.architecture import flops_per_row
from study.predictor.outside import trainings
from study.predictor.outside.published import Quantity, Role, Row, sources
from study.predictor.outside.trainings import NotPredicted, Training, training_of
from study.predictor.setup import Setup

FLAT_MFU = 0.4  # a common assumption: this share of the peak, for the operations without recomputation
OFF_BY = {"memory": 0.1, "time": 0.3}  # a prediction that is off by more has missed, and needs an explanation
TOO_LOW = 0.1  # what is predicted lower than this ends in a lack of memory
NOTHING = "neither memory nor time was published"


@dataclass(frozen=True)
class Compared:
    """One number of a row, predicted and measured: bytes, or seconds of a step."""

    quantity: Quantity
    predicted: float
    measured: float
    interval: tuple[float, float] | None = None
    others: dict[str, float] = field(default_factory=dict)  # the predictions of simpler methods

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def missed(self) -> bool:
        return abs(self.error) > OFF_BY[self.quantity]

    @property
    def inside(self) -> bool | None:
        return None if self.interval is None else self.interval[0] <= self.measured <= self.interval[1]


@dataclass(frozen=True)
class ComparedRow:
    """A row with its quantities. `reason` says why a measured quantity has no prediction."""

    row: Row
    quantities: tuple[Compared, ...]
    reason: str | None

    @property
    def complete(self) -> bool:
        """Return whether nothing was assumed."""
        return not self.row.assumptions

    def why_off(self, compared: Compared) -> str | None:
        """Return why a prediction missed, if that is known."""
        source = sources().get(self.row.source)
        return source.why_off(self.row, compared.quantity) if source and compared.missed else None

    def as_json(self) -> dict:
        row = self.row.model_dump(exclude={"memory_GB", "mfu", "assumed", "not_predicted"}, exclude_none=True)
        ours = {"key": key_of(self.row), "role": self.row.role, "assumed": self.row.assumptions, "reason": self.reason}
        return row | ours | {"quantities": [asdict(compared) for compared in self.quantities]}


def key_of(row: Row) -> str:
    """Return the identity of a row: it changes whenever the row changes."""
    return sha256(row.model_dump_json().encode()).hexdigest()[:12]


def compare(row: Row) -> ComparedRow:
    """Predict the quantities of a row."""
    measured: list[tuple[Quantity, float | None]] = [("memory", row.memory_bytes), ("time", row.step_s)]
    published = [(quantity, value) for quantity, value in measured if value is not None]
    if not published:
        return ComparedRow(row, (), NOTHING)
    try:
        training = training_of(row)
    except (NotPredicted, Stop) as reason:
        return ComparedRow(row, (), str(reason))
    predicted: list[Compared] = []
    reasons: list[str] = []
    for quantity, value in published:
        try:
            predicted.append(_compared(quantity, value, training))
        except (NotPredicted, Stop) as reason:
            reasons.append(f"{quantity}: {reason}")
    return ComparedRow(row, tuple(predicted), "; ".join(reasons) or None)


def _compared(quantity: Quantity, measured: float, training: Training) -> Compared:
    row = training.row
    if quantity == "memory":
        return Compared("memory", _short(trainings.memory(training, row.kind).value), _short(measured))
    predicted = trainings.step(training)
    others = {}
    if training.machine is not None:
        others["flat 40 % MFU"] = _short(_flat_s(training.setup, GPUS[training.machine.gpu]))
    low_s, high_s = predicted.interval or (predicted.value, predicted.value)
    return Compared("time", _short(predicted.value), _short(measured), (_short(low_s), _short(high_s)), others)


def _short(value: float) -> float:
    """Return six significant digits, so that the file of predictions stays small."""
    return float(f"{value:.6g}")


def _flat_s(setup: Setup, gpu: Gpu) -> float:
    peak = gpu.single_flops_per_s if setup.precision == "fp32" else gpu.half_flops_per_s
    flops = flops_per_row(setup.model, setup.sequence) * setup.micro_batch * setup.accumulation
    return flops / (FLAT_MFU * peak)


def simulated(row: Row) -> list[Compared]:
    """Return what a simulator predicts of its own row. Empty if the source is no simulator."""
    compared = []
    if row.simulated_memory_GB and row.memory_bytes:
        compared.append(Compared("memory", row.simulated_memory_GB * 1e9, row.memory_bytes))
    if row.simulated_step_s and row.step_s:
        compared.append(Compared("time", row.simulated_step_s, row.step_s))
    return compared


# --- over many rows ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Errors:
    """The errors of some predictions, as shares of the measured values."""

    count: int
    median_signed: float
    median_absolute: float
    worst: float  # signed, the largest by its absolute value
    within_10: float
    within_30: float
    inside: float | None  # share inside the interval, of the predictions with an interval
    others: dict[str, float]  # median absolute errors of simpler methods for the same rows

    @classmethod
    def of(cls, members: list[Compared]) -> "Errors":
        errors = [member.error for member in members]
        inside = [member.inside for member in members if member.inside is not None]
        return cls(
            count=len(errors),
            median_signed=median(errors),
            median_absolute=_median_absolute(errors),
            worst=max(errors, key=abs),
            within_10=_share(abs(error) <= 0.1 for error in errors),
            within_30=_share(abs(error) <= 0.3 for error in errors),
            inside=_share(inside) if inside else None,
            others=_others(members),
        )


def _others(members: list[Compared]) -> dict[str, float]:
    errors: dict[str, list[float]] = defaultdict(list)
    for member in members:
        for name, predicted in member.others.items():
            errors[name].append(predicted / member.measured - 1)
    return {name: _median_absolute(of_name) for name, of_name in errors.items()}


def _median_absolute(errors: list[float]) -> float:
    return median(map(abs, errors))


def _share(flags: Iterable[bool | None]) -> float:
    return fmean(map(bool, flags))


@dataclass(frozen=True)
class Group:
    """The summary of some rows."""

    rows: int
    without: int  # rows that have no prediction
    complete: int  # rows with a prediction for which nothing was assumed
    memory: Errors | None
    time: Errors | None
    memory_complete: Errors | None  # of the complete rows alone
    time_complete: Errors | None
    inside_of_sources: float | None  # the share of step times inside the interval, the mean of the sources
    simulator: dict[str, Errors]  # the source's own predictions of its rows, if it has some
    own_error: dict[Quantity, float]  # a simulator's own figure, if it does not predict row by row


def summary(members: list[ComparedRow]) -> dict[str, Group]:
    """Return the summaries by source, by role, and over all rows."""
    groups: dict[str, list[ComparedRow]] = defaultdict(list)
    for member in members:
        groups[member.row.source].append(member)
    for role in get_args(Role):
        of_role = [member for member in members if member.row.role == role]
        if of_role:
            groups[f"all of role {role}"] = of_role
    return {name: _group(of_name) for name, of_name in (groups | {"all": members}).items()}


def _group(members: list[ComparedRow]) -> Group:
    complete = [member for member in members if member.complete]
    own = [compared for member in members for compared in simulated(member.row)]
    names = {member.row.source for member in members}
    source = sources().get(names.pop()) if len(names) == 1 else None
    own_errors = {name: _errors([each for each in own if each.quantity == name]) for name in ("memory", "time")}
    return Group(
        rows=len(members),
        without=sum(not member.quantities for member in members),
        complete=sum(bool(member.quantities) for member in complete),
        memory=_errors(_of(members, "memory")),
        time=_errors(_of(members, "time")),
        memory_complete=_errors(_of(complete, "memory")),
        time_complete=_errors(_of(complete, "time")),
        inside_of_sources=_inside_of_sources(members),
        simulator={name: errors for name, errors in own_errors.items() if errors},
        own_error=source.own_error if source else {},
    )


def _of(members: list[ComparedRow], quantity: Quantity) -> list[Compared]:
    return [compared for member in members for compared in member.quantities if compared.quantity == quantity]


def _errors(members: list[Compared]) -> Errors | None:
    return Errors.of(members) if members else None


def _by_source(members: list[ComparedRow], quantity: Quantity) -> list[list[Compared]]:
    """Return the predictions of each source that has some."""
    groups: dict[str, list[Compared]] = defaultdict(list)
    for member in members:
        groups[member.row.source] += _of([member], quantity)
    return [group for group in groups.values() if group]


def _inside_of_sources(members: list[ComparedRow]) -> float | None:
    shares = [_share(compared.inside for compared in group) for group in _by_source(members, "time")]
    return mean(shares) if shares else None


@dataclass(frozen=True)
class Accuracy:
    """How far off the predictions were of rows that no constant was fitted to. Each source weighs the same."""

    rows: int
    sources: int
    median_error: float  # of the sources' medians of absolute errors
    too_low: float  # share of the rows that were predicted more than 10 % too low; the mean of the sources
    inside: float | None  # share inside the interval, of sources that did not decide its width; their mean


def accuracy_of(quantity: Quantity, members: list[ComparedRow]) -> Accuracy | None:
    """Return the accuracy over all rows that no constant was fitted to."""
    judged = [member for member in members if quantity == "memory" or member.row.role != "fit"]
    groups = _by_source(judged, quantity)
    if not groups:
        return None
    return Accuracy(
        rows=sum(map(len, groups)),
        sources=len(groups),
        median_error=median(_median_absolute([each.error for each in group]) for group in groups),
        too_low=mean(_share(each.error < -TOO_LOW for each in group) for group in groups),
        inside=_inside_of_sources([member for member in judged if member.row.role == "test"]),
    )


@dataclass(frozen=True)
class Missed:
    """Predictions that missed for one reason. Rows that only differ in their batch are one."""

    source: str
    quantity: Quantity
    model: str | None
    gpu: str | None
    gpus: int | str | None
    arm: str | None
    complete: bool
    why: str | None
    errors: tuple[float, ...] = ()


def misses(members: list[ComparedRow]) -> list[Missed]:
    """Return every prediction that missed, with its explanation."""
    together: dict[Missed, list[float]] = defaultdict(list)
    for member in members:
        row = member.row
        for compared in (compared for compared in member.quantities if compared.missed):
            about = (row.source, compared.quantity, row.model, row.gpu, row.n_gpus, row.arm)
            together[Missed(*about, member.complete, member.why_off(compared))].append(compared.error)
    return [Missed(**(vars(missed) | {"errors": tuple(errors)})) for missed, errors in together.items()]
