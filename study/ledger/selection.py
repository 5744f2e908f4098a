"""Chooses the runs that a claim's evidence rests on, and computes a quantity of them, or its ratio to other runs."""

from collections.abc import Callable, Sequence
from statistics import median

from study.records import metrics
from study.records.compare import paired
from study.records.runs import Run, Runs

MOVED = ("volume", "tensors", "calls")
TRAINING = "training"  # in a selection: which training of the script of document 002
TAKE: dict[str, Callable] = {"median": median, "least": min, "most": max}
# What nearly every document takes for granted. Other runs count only if the selection names the setting.
USUAL: dict[str, tuple] = {"optimizer": (None, "adamw"), "lora_rank": (None,), "train_only": (None,)}


def chosen(runs: Sequence[Run], where: dict) -> list[Run]:
    """Return the runs that are done and have these facts. A list means any of its values."""
    wanted = {name: value for name, value in where.items() if name != TRAINING}
    return Runs(tuple(runs)).select(**(USUAL | wanted)).done


class Quantity:
    """A quantity of a run: a number or text of its record, what its collectives moved, or one divided by another."""

    def __init__(self, name: str, per: str | None, collectives: list[str] | None, node_ranks: int | None):
        self.name = name
        self.per = per
        self.collectives = collectives
        self.node_ranks = node_ranks
        if name not in MOVED:
            metrics.refuse_unknown(name)

    def of(self, run: Run, training: int | None = None):
        value = self._whole(run, training)
        if self.per is None or value is None:
            return value
        record = run.record
        divisor = metrics.weight_bytes(record) if self.per == "weight_bytes" else metrics.value(record, self.per)
        return value / divisor if divisor else None

    def _whole(self, run: Run, training: int | None):
        if self.name in MOVED:
            return metrics.moved(run.record, self.collectives, self.name, self.node_ranks)
        return metrics.value(run.record, self.name, training)

    def values(self, runs: Sequence[Run], training: int | None = None) -> list:
        return [value for run in runs if (value := self.of(run, training)) is not None]


def of_runs(runs: Sequence[Run], where: dict, quantity: Quantity, take: str):
    """Return the median of a quantity, or its least or most; a text that all runs share. None without such runs."""
    values = quantity.values(chosen(runs, where), where.get(TRAINING))
    if not values:
        return None
    if isinstance(values[0], (int, float)) and not isinstance(values[0], bool):
        return TAKE[take](values)
    return agreed(values)


def agreed(values: list):
    """Return what all of these are."""
    first, *others = values
    if any(each != first for each in others):
        raise ValueError(f"the runs disagree: {', '.join(sorted(set(map(str, values))))}")
    return first


def ratio(runs: Sequence[Run], where: dict, over: dict, quantity: Quantity, take: str) -> float | None:
    """Return a quantity over that of other runs, by pairs of equal cells on one machine. None without a pair."""
    theirs = where | over
    pairs = paired(chosen(runs, where), chosen(runs, theirs), {*over} - {TRAINING})
    ratios = []
    for our_runs, their_runs in pairs:
        above = quantity.values(our_runs, where.get(TRAINING))
        below = quantity.values(their_runs, theirs.get(TRAINING))
        if above and below and median(below):
            ratios.append(median(above) / median(below))
    return TAKE[take](ratios) if ratios else None
