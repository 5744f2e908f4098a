"""How far each arm goes under a memory cap."""

import contextlib
from typing import Any

import pandas as pd

from study.core.errors import Stop
from study.core.shapes import shape_of
from study.predict.front import named
from study.records.groups import groups, lines
from study.records.runs import Run, Runs
from study.report.grouping import SETTINGS, columns
from study.report.topics import memory


def table(runs: Runs) -> pd.DataFrame:
    """Return for each arm under a memory cap the largest model or batch that ran, and the smallest that did not.

    Offloading without a GPU is left out: the emulated device then holds what is offloaded as well.
    """
    rows = []
    ended = [run for run in runs if run.record.requested.memory_cap_gib and run.record.status in ("done", "oom")]
    capped = [run for run in ended if not memory.has_one_memory(run)]
    for what in ("model", "micro_batch"):
        alike = [name for name in ("memory_cap_gib", *SETTINGS) if name not in (what, "attention")]
        for group, members in groups(capped, only=alike).items():
            sizes = _sizes(members, what)
            tried = [run for run in members if run.facts[what] in sizes]
            for line, mine in lines(tried).items() if len(sizes) > 1 else ():
                done = {run.facts[what] for run in mine if run.record.status == "done"}
                failed = {run.facts[what] for run in mine} - done
                place = {"group": group, "line": line, "what": what} | columns(mine[0], "memory_cap_gib")
                ends = {
                    "largest": max(done, key=lambda value: sizes[value], default=None),
                    "failed": min(failed, key=lambda value: sizes[value], default=None),
                }
                rows.append(place | ends | {"n": len(mine)})
    return pd.DataFrame(rows)


def _sizes(members: list[Run], what: str) -> dict[Any, int]:
    """Return the values that were tried with what orders them: rows per pass by their number, models by parameters."""
    if what == "micro_batch":
        return {run.record.requested.micro_batch: run.record.requested.micro_batch or 0 for run in members}
    observed: dict[Any, int] = {
        run.record.requested.model: run.record.observed.parameters
        for run in members
        if run.record.requested.model and run.record.observed.parameters
    }
    for model in {run.record.requested.model for run in members if run.record.requested.model} - observed.keys():
        with contextlib.suppress(Stop):  # no built-in shape has this name
            observed[model] = named(shape_of(model)).parameters
    return observed
