"""The record of a run, as in `record.json`: its sections, and when it is complete.

A record holds what was measured. `study.records.metrics` computes what follows from it.
"""

import datetime
import itertools
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator

from study.core.errors import Stop
from study.core.files import safe_name
from study.records.sections import (
    CellOfRun,
    Error,
    Flag,
    HardwareOfRun,
    Loss,
    Machine,
    Memory,
    Observed,
    Promised,
    Requested,
    Section,
    Text,
    Time,
    Traffic,
    Watched,
)

SCHEMA = 3  # 2: also values that follow from others
# Raise this number when the way of measuring changes: records of two versions are not pooled.
# 2: the tracked memory of a stage 3 run no longer contains the copy that gloo makes for a reduce-scatter.
# 3: rates divide by the wall time of the timed windows, not by the sum of the slowest rank's steps.
# 4: what DeepSpeed makes in the optimizer step is a temporary of the update, and no activation. Sums are the same.
MEASURE_VERSION = 4

# How a run ended. oom: of the device, or of its host. killed: by a signal. An error says why a run is not done.
Status = Literal["running", "done", "failed", "oom", "killed", "timeout", "diverged"]
MOST_LOSS = 1e6
NEEDED = {"running": [], "done": ["finished_utc", "observed", "hardware", "software"]}  # others say why they ended


def _safe_name(name: str) -> str:
    """Return a run's name, which becomes a file name in a report, so it must not lead out of a folder."""
    try:
        return safe_name(name)
    except Stop as stop:
        raise ValueError(stop.what) from None


def _moment(text: str) -> str:
    datetime.datetime.fromisoformat(text)  # a ValueError if it is no time
    return text


Moment = Annotated[str, AfterValidator(_moment)]


class Record(BaseModel):
    """Everything about one run."""

    model_config = Section.model_config

    # Whatever it was read from, it is of the newest schema now.
    schema_version: Annotated[Literal[2, 3], AfterValidator(lambda _: SCHEMA), Field(alias="schema")] = 3
    measure_version: int = MEASURE_VERSION
    run_id: Annotated[str, AfterValidator(_safe_name)]
    cell: CellOfRun = CellOfRun()
    status: Status = "running"
    started_utc: Moment
    finished_utc: Moment | None = None
    commit: Text = None
    dirty: Flag = None
    argv: list[str] = []
    requested: Requested = Requested()
    promised: Promised = Promised()
    watched: Watched = Watched()
    observed: Observed = Observed()
    hardware: HardwareOfRun = HardwareOfRun()  # of the first rank's machine
    machines: list[Machine] = []  # empty: one machine
    software: dict[str, str | None] = {}  # the same on each machine
    loss: Loss = Loss()
    time: Time = Time()
    memory: Memory = Memory()
    traffic: Traffic = Traffic()
    # resumes: the earlier run that this one continues, and the step after which it does. Times and peaks are of timed
    # steps after that; losses and rates are of the whole training.
    checkpoints: dict[str, list[dict]] = {}
    error: Error | None = None

    @model_validator(mode="after")
    def _has_its_sections(self):
        """Refuse a run that has ended, but does not say how it went."""
        needed = [*NEEDED.get(self.status, ["error"])]
        # Of a user's own script settings, times and losses may stay unknown.
        if self.status == "done" and not self.is_watched:
            needed += ["requested", "time"]
            if not self.is_virtual:
                needed.append("loss")
        for name in needed:
            if getattr(self, name) == Record.model_fields[name].default:
                raise ValueError(f"status is {self.status}, but {name!r} is empty")
        return self

    @model_validator(mode="after")
    def _has_possible_losses(self):
        """Refuse a training of ours that is done with a loss that no training has."""
        losses = [*self.loss.train, *(each.eval_loss for each in self.loss.eval)]
        losses += itertools.chain.from_iterable(each.losses for each in self.observed.runs)
        # Cross entropies are above 0. A diverged training may pass the bound, but is not done. Other people's losses
        # may have any value.
        wrong = [loss for loss in losses if not 0 < loss < MOST_LOSS]
        if wrong and self.status == "done" and not self.is_watched:
            raise ValueError(f"a loss is {wrong[0]:g}, but should be above 0")
        return self

    @property
    def is_virtual(self) -> bool:
        """Return whether one rank of a group ran alone: its collectives moved nothing, and it has no loss."""
        return bool(self.observed.virtual_ranks or self.requested.virtual_ranks)

    @property
    def is_script(self) -> bool:
        """Return whether this is a run of document S002's published script, not of this study's trainer."""
        return self.requested.repair is not None or bool(self.observed.runs)

    @property
    def is_watched(self) -> bool:
        """Return whether this is a run of a user's own script."""
        return self.watched != Record.model_fields["watched"].default

    @property
    def arm(self) -> str:
        """Return the arm of the settings; for a user's own script, the arm that its prepared objects are."""
        return self.requested.arm or self.observed.arm or "unknown"

    @property
    def wall_s(self) -> float | None:
        """Return the seconds from start to end."""
        if self.finished_utc is None:
            return None
        start, end = map(datetime.datetime.fromisoformat, (self.started_utc, self.finished_utc))
        return (end - start).total_seconds()

    @property
    def identity(self) -> str:
        """Return what tells a run from a copy of another, so that a copied record is not counted twice."""
        # Not `run_id`, because a copy under another name is still a copy. Times are known to the millisecond.
        return f"{self.started_utc} {self.finished_utc} {self.requested.arm} {self.requested.seed}"
