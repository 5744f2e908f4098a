"""The facts that runs are chosen by, and which values they can have."""

import difflib
import functools
from pathlib import Path
from types import GenericAlias
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from study.core.errors import Stop
from study.core.validation import nearest, sentence
from study.records.runs import Run
from study.records.schema import Record, Requested

MISSPELT = 0.75  # similarity to the name of an arm from which on a name counts as misspelt
HOMES = ("nvme", "cpu", "none")
OBSERVED = ("stage", "wrapper", "optimizer", "parameters", "offload_optimizer", "offload_param", "ranks")
UNKNOWN = Record(run_id="unknown", started_utc="")  # an empty record: it refuses names that no record has


@functools.cache  # called for every run and claim
def facts(run: Run) -> dict:
    """Return the facts that runs are chosen by: all that was requested, and some of what was observed."""
    record = run.record
    observed = record.observed
    device = record.hardware.devices[0] if record.hardware.devices and observed.device != "cpu" else None
    homes = (observed.offload_optimizer, observed.offload_param)
    return {
        **dict(record.requested),
        **{name: getattr(observed, name) for name in OBSERVED},
        "virtual": run.virtual,
        "batch": observed.rows_per_step,
        "run": run.name,
        "nodes": record.requested.hosts,
        "link": f"{record.requested.bandwidth_mbit} Mbit/s" if record.requested.hosts else None,
        "script": "as_printed" if record.is_script else "train",
        "protocol_part": record.cell.part,
        "device": device.name if device else "CPU",
        "device_memory": device.memory_bytes if device else None,
        "offload": next((home for home in HOMES if home in homes), None),
    }


FACTS = tuple(facts(Run(Path(), UNKNOWN)))


def refuse_impossible(name: str, values: list, arms: list[str]) -> None:
    """Raise Stop for a value that no run can have. Otherwise it would seem that the run was not made yet.

    A name that is like no known arm's may be that of a future arm.
    """
    if name not in FACTS:
        raise Stop(f"records have no {name!r}", nearest(name, FACTS))
    known = {"arm": arms}.get(name, [*HOMES, None] if name.startswith("offload") else values)
    for value in values:
        is_new = name == "arm" and not difflib.get_close_matches(str(value), arms, 1, MISSPELT)
        if value not in known and not is_new:
            raise Stop(f"{name} cannot be {value!r}", nearest(str(value), [each for each in known if each]))
    if name in Requested.model_fields and name not in OBSERVED:
        try:
            _list_of(name).validate_python(values)
        except ValidationError as error:
            raise Stop(f"{name} {sentence(error, name=lambda _: '')}", "give a value that a run can have") from None


@functools.cache
def _list_of(name: str) -> TypeAdapter:
    hint: Any = GenericAlias(list, (Requested.model_fields[name].annotation,))  # only known when it runs
    return TypeAdapter(hint, config=ConfigDict(strict=True))
