"""Sort runs into groups that may share a figure, each with a short label that distinguishes it."""

import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from study.core.text import number_of
from study.records.runs import Run

T = TypeVar("T")
LABELS = {  # the names of settings in a label; any other setting keeps its own name
    "micro_batch": "micro-batch",
    "accumulation": "accumulation",
    "sequence": "tokens",
    "memory_cap_gib": "cap GiB",
    "train_rows": "training sequences",
    "eval_rows": "evaluation sequences",
}
ALWAYS_NAMED = ("task", "model", "precision")
# Only named if nothing else distinguishes two groups.
RARELY_NAMED = {"lr", "warmup_steps", "eval_every", "eval_rows", "train_rows", "sequence", "instruments", "init"}
VARIES = ("arm", "seed", "ranks")  # may differ within a group


def grouped(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Return items by their key, in the order in which the keys come."""
    members: dict[Any, list[T]] = {}
    for item in items:
        members.setdefault(key(item), []).append(item)
    return members


def by(runs: Iterable[Run], *names: str) -> dict[tuple, list[Run]]:
    return grouped(runs, lambda run: tuple(run.facts[name] for name in names))


def differing(several: list[dict]) -> list[str]:
    """Return the names whose values are not the same in all of them, in the order in which they come."""
    # As JSON, because a setting may be a list.
    names = dict.fromkeys(itertools.chain.from_iterable(several))
    return [name for name in names if len({json.dumps(each.get(name)) for each in several}) > 1]


def groups(runs: Iterable[Run], only: Iterable[str] | None = None) -> dict[str, list[Run]]:
    """Return runs of equal cells in one environment by label; arm, seed and ranks may differ within a group.

    `only` names the few settings that must be equal, for quantities such as bytes that depend on nothing else. Then the
    device and the measure version must be equal too.
    """

    def conditions(run: Run) -> str:
        left_out = {*VARIES}
        if run.record.requested.steps:
            left_out.add("epochs")  # --steps overrides it
        how: dict[str, object] = {"environment": run.environment}
        if only is not None:
            left_out |= run.cell.keys() - set(only)
            how = {"device": run.record.observed.device, "measure_version": run.record.measure_version}
        return json.dumps(json.loads(run.key(left_out)) | how)

    members = grouped(runs, conditions)
    return dict(zip(labels([json.loads(cell) for cell in members]), members.values(), strict=True))


def labels(cells: list[dict]) -> list[str]:
    """Return a name for each cell: task, model, precision, and the settings that tell cells of the same name apart."""
    names = [", ".join(str(cell[name]) for name in ALWAYS_NAMED if name in cell) for cell in cells]
    in_order = [*LABELS, *sorted(set().union(*cells) - LABELS.keys())]
    # Twice: a setting that is rarely named gets its turn where the others leave two cells with one name.
    for quiet in (RARELY_NAMED, set[str]()):
        alike = grouped(zip(names, cells, strict=True), lambda pair: pair[0])
        differ = {name: {*differing([cell for _, cell in pairs])} - quiet for name, pairs in alike.items()}
        longer = []
        for name, cell in zip(names, cells, strict=True):
            shown = differ[name]
            if quiet and cell.get("accumulation", 1) != 1:  # always: traffic and time are of all passes of a step
                shown = shown | {"accumulation"}
            longer.append(name + "".join(_setting(each, cell.get(each)) for each in in_order if each in shown))
        names = longer
    # A setting that is off is not shown, so even now two may have one name. They get numbers.
    return [name if names.count(name) == 1 else f"{name} ({names[:i].count(name) + 1})" for i, name in enumerate(names)]


def _setting(name: str, value: object) -> str:
    """Return a setting as part of a label; empty if it is off or was not given."""
    if value is None or value is False:
        return ""
    words = LABELS.get(name, name.replace("_", " "))
    return f", {words}" if value is True else f", {words} {value}"


def lines(runs: list[Run]) -> dict[str, list[Run]]:
    """Return the runs of a group by line of a figure: by arm, and by ranks and kind if an arm has several."""
    members: dict[str, list[Run]] = {}
    for (arm,), runs_of_arm in by(runs, "arm").items():
        several = len(by(runs_of_arm, "ranks")) > 1
        for (ranks, kind), same in by(runs_of_arm, "ranks", "kind").items():
            name = arm
            if several:
                name += f", {number_of(ranks or 0, 'ranks')}"
            if kind != "real":
                name += f" ({kind})"
            members[name] = same
    return members
