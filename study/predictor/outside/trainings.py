"""Published step times, with the setup and machine that they are predicted from."""

from dataclasses import dataclass

from study.predictor.outside import rows, sources
from study.predictor.outside.predict import machine_of
from study.predictor.outside.rows import Row
from study.predictor.outside.setups import NoSetup, training_of
from study.predictor.setup import Setup
from study.predictor.timing.steptime import Machine


@dataclass(frozen=True)
class Timed:
    """A row with a measured step, its setup and its machine."""

    row: Row
    setup: Setup
    machine: Machine


def timed(role: sources.Role) -> list[Timed]:
    """The rows of a role that have a step time and can be predicted."""
    measured = []
    for row in rows.own():
        if sources.own()[row.source].role_of(row) != role or row.step_s is None:
            continue
        try:
            training = training_of(row)
        except NoSetup:
            continue
        if training.machine:
            measured.append(Timed(row, training.setup, machine_of(training)))
    return measured
