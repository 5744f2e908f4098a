"""Predicts the memory and the step of a row's training. Everything else in this package uses these two calls."""

from typing import NamedTuple

from study.predictor.estimate import estimate
from study.predictor.memory.memory_kinds import memory_kinds
from study.predictor.outside.rows import MemoryKind
from study.predictor.outside.setups import NoSetup, Training
from study.predictor.timing.steptime import Machine, step_time


class Prediction(NamedTuple):
    """A value, and the ends of its interval if theory gives one."""

    value: float
    interval: tuple[float, float] | None


def memory(training: Training, kind: MemoryKind | None) -> Prediction:
    """Bytes that a GPU holds at the peak of a step. An unknown kind means allocated memory, as programs print."""
    if kind in (None, "allocated"):
        return Prediction(float(estimate(training.setup).peak_bytes), None)
    held = memory_kinds(training.setup, training.machine and training.machine.gpu)
    if getattr(held, kind) is None:
        raise NoSetup(f"memory as {kind} is not predicted for a model of formulas")
    return Prediction(float(getattr(held, kind)), None)


def step(training: Training) -> Prediction:
    """Seconds of a step, and an interval meant to hold 80 % of measurements."""
    if training.machine is None:
        raise NoSetup(training.no_machine)
    predicted = step_time(training.setup, machine_of(training))
    return Prediction(predicted.seconds, (predicted.low_s, predicted.high_s))


def machine_of(training: Training) -> Machine:
    machine = training.machine
    return Machine(
        gpu=machine.gpu,
        gpus_per_node=machine.gpus_per_node,
        network=machine.network,
        fused_kernels=machine.fused_kernels,
    )
