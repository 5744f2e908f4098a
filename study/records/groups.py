"""Sort runs into groups that may share a figure, each with a short label that distinguishes it."""

import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any

from study.core.text import number_of
from study.records.runs import Run

LABELS = {  # the names of settings in a label; any other setting keeps its own name
    "micro_batch": "rows/pass",
    "accumulation": "passes",
    "sequence": "tokens",
    "memory_cap_gib": "cap GiB",
    "train_rows": "training rows",
    "eval_rows": "evaluation rows",
}
ALWAYS_NAMED = ("task", "model", "precision")
# Only named if nothing else distinguishes two groups.
RARELY_NAMED = {"lr", "warmup_steps", "eval_every", "eval_rows", "train_rows", "sequence", "instruments", "init"}
VARIES = ("arm", "seed", "ranks")  # may differ within a group


def grouped(runs: Iterable[Run], key: Callable[[Run], Any]) -> dict[Any, list[Run]]:
    """Runs by their key, in the order in which the keys come."""
    members: dict[Any, list[Run]] = {}
    for run in runs:
        members.setdefault(key(run), []).append(run)
    return members


def by(runs: Iterable[Run], *names: str) -> dict[tuple, list[Run]]:
    """Runs grouped by these of their facts."""
    return grouped(runs, lambda run: tuple(run.facts[name] for name in names))


def differing(several: list[dict]) -> list[str]:
    """The names whose values are not the same in all of them, in the order in which they come."""
    # As JSON, because a setting may be a list.
    names = dict.fromkeys(itertools.chain.from_iterable(several))
    return [name for name in names if len({json.dumps(each.get(name)) for each in several}) > 1]


def groups(runs: Iterable[Run], only: Iterable[str] | None = None) -> dict[str, list[Run]]:
    """Runs of equal cells in one environment by label; arm, seed and ranks may differ within a group.

    `only` names the few settings that must be equal, for quantities such as bytes that depend on nothing else. Then the
    device and the measure version must be equal too.
    """
    members: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        record = run.record
        left_out = {*VARIES}
        if record.requested.steps:
            left_out.add("epochs")  # --steps overrides it
        conditions = [f"environment {run.environment}"]
        if only is not None:
            left_out |= run.cell.keys() - set(only)
            conditions = [f"on {record.observed.device}", f"measured by version {record.measure_version}"]
        members.setdefault((run.key(left_out), *conditions), []).append(run)
    # --- a label: that of the cell, and those conditions that not all groups share
    cells = list(dict.fromkeys(cell for cell, *_ in members))
    names = dict(zip(cells, labels([json.loads(cell) for cell in cells]), strict=True))
    shared = set.intersection(*map(set, members)) if members else set()
    by_label = {}
    for (cell, *conditions), runs_of_group in members.items():
        shown = [text for text in conditions if text not in shared]
        by_label[", ".join([names[cell], *shown])] = runs_of_group
    return by_label


def labels(cells: list[dict]) -> list[str]:
    """A name for each cell: task, model, precision, and the settings that tell cells of the same name apart."""
    names = [", ".join(str(cell[name]) for name in ALWAYS_NAMED if name in cell) for cell in cells]
    settings = set().union(*cells).difference(ALWAYS_NAMED)
    in_order = [*(name for name in LABELS if name in settings), *sorted(settings - LABELS.keys())]
    # Twice: a setting that is rarely named gets its turn where the others leave two cells with one name.
    for quiet in (RARELY_NAMED, set()):
        longer = []
        for name, cell in zip(names, cells, strict=True):
            shown = {*differing([other for other, same in zip(cells, names, strict=True) if same == name])} - quiet
            longer.append(name + "".join(_setting(each, cell.get(each)) for each in in_order if each in shown))
        names = longer
    # A setting that is off is not shown, so even now two may have one name. They get numbers.
    return [name if names.count(name) == 1 else f"{name} ({names[:i].count(name) + 1})" for i, name in enumerate(names)]


def _setting(name: str, value: object) -> str:
    """A setting as part of a label; empty if it is off or was not given."""
    words = LABELS.get(name, name.replace("_", " "))
    if value in (None, False):
        return ""
    if value is True:
        return f", {words}"
    return f", {words} {value}"


def lines(runs: list[Run]) -> dict[str, list[Run]]:
    """The runs of a group by line of a figure: by arm, and by ranks and kind if an arm has several."""
    members: dict[str, list[Run]] = {}
    for (arm,), runs_of_arm in by(runs, "arm").items():
        several = len(by(runs_of_arm, "ranks")) > 1
        for run in runs_of_arm:
            name = arm
            if several:
                name += f", {number_of(run.record.observed.ranks or 0, 'ranks')}"
            if run.kind != "real":
                name += f" ({run.kind})"
            members.setdefault(name, []).append(run)
    return members
