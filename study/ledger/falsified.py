"""Other values than those that were recorded or given: what planted falsehoods put in their place."""

import functools
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from study.ledger.arguments import is_number
from study.records import metrics
from study.records.schema import Collective

ENDS = {"done": "oom", "oom": "done", "host_oom": "done", "unavailable": "done"}  # how a run ended, and might have
# Where records have what a check reads, if it is not a path itself.
SECTIONS = dict.fromkeys(metrics.SIZES, "memory") | dict.fromkeys(metrics.TIMES, "time")
SECTIONS |= dict.fromkeys(metrics.LOSSES, "loss") | {"joules_per_step": "energy", "saved_bytes": "observed.saved"}
SECTIONS |= {"parameters": "observed.parameters", "held_parameters": "observed.held_parameters"}
SECTIONS |= {"ran": "status", "counted": "traffic", "same_loss": "loss"}


def scaled(value: Any, factor: float) -> Any:
    """Return so many times a number, or both ends of a range. Whole numbers stay whole, and above 0."""
    if isinstance(value, tuple):
        return tuple(scaled(each, factor) for each in value)
    if not is_number(value):
        return value
    return max(1, round(value * factor)) if isinstance(value, int) and value > 0 else value * factor


def changed(content: Any, path: str, change: Callable[[Any], Any]) -> Any:
    """Return a copy in which the value at a dotted path is changed."""
    name, _, rest = path.partition(".")
    if not path:
        return change(content)
    if isinstance(content, BaseModel):
        return content.model_copy(update={name: changed(getattr(content, name), rest, change)})
    if isinstance(content, list):
        chosen = int(name) % max(len(content), 1)  # -1 is the last one; there may be none
        return [changed(each, rest, change) if place == chosen else each for place, each in enumerate(content)]
    return content | {name: changed(content.get(name), rest, change)} if isinstance(content, dict) else content


def another(value: Any, factor: float, wanted: object) -> Any:
    """Return another value of a record: a text that is wanted, 1 instead of 0, a multiple; of each value below it."""
    further = functools.partial(another, factor=factor, wanted=wanted)
    if isinstance(value, BaseModel):
        return value.model_copy(update={name: further(each) for name, each in value})
    if isinstance(value, dict):
        return {name: further(each) for name, each in value.items()}
    if isinstance(value, list):
        return [further(each) for each in value]
    if isinstance(value, str):
        return wanted if isinstance(wanted, str) and wanted != value else ENDS.get(value, f"not {value}")
    if isinstance(value, bool):
        return not value
    return int(factor > 1) if is_number(value) and not (value and factor) else scaled(value, factor)


def renamed(per_rank: list[dict[str, Collective]], kind: str) -> list[dict[str, Collective]]:
    """Return the collectives of each rank as if all had been of one kind."""
    return [{kind: max(counts.values(), key=lambda each: each.bytes)} for counts in per_rank if counts]
