"""What theory says of a row's training: the two calls that everything else here goes through."""

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from study.outside.setups import NoSetup, Training
from study.spec.arms import OFFLOADS, Arm
from study.theory.estimate import estimate
from study.theory.question import Given, Question
from study.theory.setup import arm_named
from study.theory.steptime import step_s


class Prediction(NamedTuple):
    """A value, and the ends of its interval where theory gives one."""

    value: float
    interval: tuple[float, float] | None


def memory(training: Training, kind: str | None) -> Prediction:
    """Bytes that a GPU holds at the peak of a step."""
    return Prediction(float(estimate(training.setup).peak_bytes), None)


def step(training: Training) -> Prediction:
    """Seconds of a step."""
    low, high = earlier_interval(training)
    return Prediction(math.sqrt(low * high), (low, high))


def earlier_interval(training: Training) -> tuple[float, float]:
    """Seconds if everything overlaps at the best pace, and if nothing does at the worst. FSDP is as a ZeRO stage."""
    setup, machine = training.setup, training.machine
    if machine is None:
        raise NoSetup(training.no_machine)
    if setup.fsdp:
        twin = arm_named("zero3_textbook" if setup.fsdp == "full_shard" else "zero2").deepspeed
        setup = replace(setup, deepspeed=twin, fsdp=None, precision="bf16_cast")
    question = Question.of(
        setup.model,
        machine.gpus,
        machine.gpu,
        Given(
            sequence=setup.sequence,
            batch=setup.micro_batch * setup.accumulation * setup.ranks,
            precision=setup.precision.replace("bf16_pure", "bf16_cast"),
            checkpointing=setup.checkpointing,
            disk_bytes_per_s=6e9,
            gpus_per_node=machine.gpus_per_node,
        ),
    )
    zero = (setup.deepspeed or {}).get("zero_optimization", {})
    homes = [zero.get(part, {}).get("device", "none") for part in OFFLOADS]
    arm = Arm("", Path(), "DEEPSPEED" if setup.deepspeed else "NO", 1, setup.deepspeed, zero.get("stage"), *homes)
    setup = replace(setup, precision=setup.precision.replace("bf16_pure", "bf16_cast"))
    return step_s(question, arm, estimate(setup), setup.micro_batch)[0]
