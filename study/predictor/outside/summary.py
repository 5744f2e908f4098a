"""The errors of predictions: by source, by role, and over all rows."""

import statistics
import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from study.predictor.outside import sources
from study.predictor.outside.compare import Compared, Quantity, simulated
from study.predictor.outside.rows import Row

FEWEST_IN_A_TABLE = 3  # two rows show no order


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
    others: dict[str, float]  # median absolute errors of simpler ways to predict the same rows

    @classmethod
    def of(cls, quantities: list[Quantity]) -> "Errors":
        errors = [quantity.error for quantity in quantities]
        inside = [quantity.inside for quantity in quantities if quantity.inside is not None]
        names = dict.fromkeys(name for quantity in quantities for name in quantity.others)
        return cls(
            count=len(errors),
            median_signed=statistics.median(errors),
            median_absolute=_median_absolute(errors),
            worst=max(errors, key=abs),
            within_10=_share(abs(error) <= 0.1 for error in errors),
            within_30=_share(abs(error) <= 0.3 for error in errors),
            inside=_share(inside) if inside else None,
            others={name: _median_absolute(_errors_of(name, quantities)) for name in names},
        )


def _errors_of(other: str, quantities: list[Quantity]) -> list[float]:
    return [each.others[other] / each.measured - 1 for each in quantities if other in each.others]


def _median_absolute(errors: list[float]) -> float:
    return statistics.median(map(abs, errors))


def _share(flags: Iterable[bool]) -> float:
    flags = list(flags)
    return sum(flags) / len(flags)


@dataclass(frozen=True)
class Order:
    """Kendall's tau of tables. A table is the rows of one source and model on the same number of GPUs."""

    tables: int
    of_step_times: float  # the median of the tables
    of_tokens_per_s: float


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
    order: Order | None
    simulator: dict[str, Errors]  # the source's own predictions of its rows, if it has some
    own_error: dict[str, float]  # a simulator's own figure, if it does not predict row by row


def misses(compared: list[Compared]) -> list[dict]:
    """Every prediction that missed, with its explanation. Rows that only differ in their batch are merged."""
    together: dict[tuple, list[float]] = defaultdict(list)
    for each in compared:
        for quantity in (quantity for quantity in each.quantities if quantity.missed):
            row, why = each.row, each.why_off(quantity)
            complete = not each.assumed
            key = (row.source, quantity.quantity, row.model, row.gpu, row.n_gpus, row.arm, complete, why)
            together[key].append(quantity.error)
    names = ("source", "quantity", "model", "GPU", "GPUs", "arm", "complete", "why")
    return [
        dict(zip(names, key, strict=True)) | {"rows": len(errors), "from": min(errors), "to": max(errors)}
        for key, errors in together.items()
    ]


def summary(compared: list[Compared]) -> dict[str, Group]:
    """The summaries by source, by role, and over all rows."""
    groups = defaultdict(list)
    for each in compared:
        groups[each.row.source].append(each)
    for role in get_args(sources.Role):
        if of_role := [each for each in compared if each.role == role]:
            groups[f"all of role {role}"] = of_role
    return {name: _group(members) for name, members in (groups | {"all": compared}).items()}


def _group(members: list[Compared]) -> Group:
    complete = [each for each in members if not each.assumed]
    own = [quantity for each in members for quantity in simulated(each.row)]
    known, names = sources.own(), {each.row.source for each in members}
    own_errors = [known[name].own_error if name in known else {} for name in names]
    return Group(
        rows=len(members),
        without=sum(not each.quantities for each in members),
        complete=sum(bool(each.quantities) for each in complete),
        **{name: _errors(members, name) for name in ("memory", "time")},
        **{f"{name}_complete": _errors(complete, name) for name in ("memory", "time")},
        inside_of_sources=_inside_of_sources(members),
        order=_order(members),
        simulator={
            name: Errors.of(of_name)
            for name in ("memory", "time")
            if (of_name := [quantity for quantity in own if quantity.quantity == name])
        },
        own_error=own_errors[0] if len(own_errors) == 1 else {},
    )


def _errors(members: list[Compared], name: str) -> Errors | None:
    quantities = [quantity for each in members for quantity in each.quantities if quantity.quantity == name]
    return Errors.of(quantities) if quantities else None


def _inside_of_sources(members: list[Compared]) -> float | None:
    inside = defaultdict(list)
    for each in members:
        inside[each.row.source] += [q.inside for q in each.quantities if q.quantity == "time" and q.inside is not None]
    shares = [_share(flags) for flags in inside.values() if flags]
    return statistics.mean(shares) if shares else None


def _order(members: list[Compared]) -> Order | None:
    tables = defaultdict(list)
    for each in members:
        for quantity in each.quantities:
            if quantity.quantity == "time":
                tables[each.row.source, each.row.model, each.row.n_gpus].append((each.row, quantity))
    taus = [_taus(table) for table in tables.values() if len(table) >= FEWEST_IN_A_TABLE]
    taus = [pair for pair in taus if None not in pair]
    if not taus:
        return None
    return Order(len(taus), *(statistics.median(column) for column in zip(*taus, strict=True)))


def _taus(table: list[tuple[Row, Quantity]]) -> tuple[float | None, float | None]:
    """Kendall's tau of step times, and of tokens per second, which do not grow with the batch by themselves."""
    tokens = [row.micro_batch * (row.grad_acc or 1) * (row.seq or 1) for row, _ in table]
    predicted, measured = ([getattr(each, name) for _, each in table] for name in ("predicted", "measured"))
    rates = [[count / s for count, s in zip(tokens, side, strict=True)] for side in (predicted, measured)]
    return _tau(predicted, measured), _tau(*rates)


def _tau(predicted: list[float], measured: list[float]) -> float | None:
    from scipy.stats import kendalltau  # loaded on first use: it takes most of a second

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tau = float(kendalltau(predicted, measured).statistic)
    return None if tau != tau else tau  # NaN: all values are equal
