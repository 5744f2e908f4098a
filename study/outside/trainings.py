"""Published step times with what they are predicted from."""

from dataclasses import dataclass

from study.outside import rows, sources
from study.outside.predict import machine_of
from study.outside.rows import Row
from study.outside.setups import NoSetup, training_of
from study.theory.setup import Setup
from study.theory.steptime import Machine


@dataclass(frozen=True)
class Timed:
    """A row that measured a step, and what is predicted from."""

    row: Row
    setup: Setup
    machine: Machine


def timed(role: sources.Role) -> list[Timed]:
    """The rows of a role that have a step time and can be predicted."""
    found = []
    for row in rows.own():
        if sources.own()[row.source].role_of(row) != role or row.step_s is None:
            continue
        try:
            training = training_of(row)
        except NoSetup:
            continue
        if training.machine:
            found.append(Timed(row, training.setup, machine_of(training)))
    return found
