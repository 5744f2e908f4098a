"""How far predictions are from published measurements, as tables and sentences."""

from collections.abc import Iterable
from statistics import mean, median
from typing import get_args

from study.bench import first_scores
from study.bench.published_errors import TOO_LOW, Error, grouped, summary, table
from study.io.numbers import percent, signed
from study.predictor.outside.published import Quantity, Role, sources
from study.predictor.outside.trainings import FLAT, ComparedRow


def lines(members: Iterable[ComparedRow]) -> list[dict]:
    """Return the errors of each source, of each role, and of all rows."""
    errors = table(members)
    groups = grouped(errors, lambda each: each.row.source)
    groups |= {f"all of role {role}": [each for each in errors if each.row.role == role] for role in get_args(Role)}
    error_lines = []
    for name, group in (groups | {"all": errors}).items():
        for quantity in get_args(Quantity):
            if mine := [each for each in group if each.compared.quantity == quantity]:
                own_error = sources()[name].own_error.get(quantity) if name in sources() else None
                error_lines.append({"source": name, "quantity": quantity} | _line(mine, own_error))
    return error_lines


def _line(errors: list[Error], own_error: float | None) -> dict:
    numbers = [each.compared for each in errors]
    complete = [each.compared.off for each in errors if each.member.complete]
    flat = [abs(each.others[FLAT] / each.measured - 1) for each in numbers if FLAT in each.others]
    return summary(numbers) | {
        "complete rows": len(complete) or None,
        "off by (complete)": percent(median(complete)) if complete else None,
        "within 10 % (complete)": _counted(complete, 0.1),
        "within 30 % (complete)": _counted(complete, 0.3),
        FLAT: percent(median(flat)) if flat else None,
        "its simulator": None if own_error is None else percent(own_error),
    }


def _counted(off: list[float], limit: float) -> str | None:
    return f"{sum(each <= limit for each in off)} of {len(off)}" if off else None


def misses(members: Iterable[ComparedRow]) -> list[dict]:
    """Return the predictions that missed, with their explanations. Rows that only differ in their batch are one."""

    def alike(each: Error) -> tuple:
        row = each.row
        about = (row.source, each.compared.quantity, row.model, f"{row.n_gpus} x {row.gpu}", row.arm)
        return (*about, "yes" if each.member.complete else "no", each.member.why_off(each.compared) or "not explained")

    miss_lines = []
    names = ("source", "quantity", "model", "on", "arm", "complete", "why")
    for key, mine in grouped((each for each in table(members) if each.compared.missed), alike).items():
        off = [each.compared.error for each in mine]
        ends = dict.fromkeys((signed(min(off)), signed(max(off))))
        *about, why = zip(names, key, strict=True)
        miss_lines.append(dict(about) | {"rows": len(mine), "off by": " to ".join(ends)} | dict([why]))
    return miss_lines


def accuracy() -> str:
    """Return in a sentence how accurate predictions were of trainings that the predictor had not met.

    Over all frozen rows, each as it was predicted at first; refused rows have no error. All rows weigh the same.
    """
    errors: dict[str, list[float]] = {"time": [], "memory": []}
    for each in first_scores.read():
        if each.error is not None:
            errors[each.quantity].append(each.error)
    times, peaks = errors["time"], errors["memory"]
    near = percent(mean(abs(each) <= 1 / 3 for each in times))
    off, peaks_off = list(map(abs, times)), list(map(abs, peaks))
    return (
        f"On trainings that it had never seen, half of {len(times)} predicted step times were within "
        f"{percent(median(off))} of the measured one, and {near} within a third; "
        f"half of {len(peaks)} memory peaks were within {percent(median(peaks_off))}, but "
        f"{percent(mean(each < -TOO_LOW for each in peaks))} were more than {TOO_LOW:.0%} too low: leave room, and run "
        "ten steps before you rely on a time."
    )
