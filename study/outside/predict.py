"""What theory says of a row's training: the two calls that everything else here goes through."""

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from study.outside.rows import MemoryKind
from study.outside.setups import NoSetup, Training
from study.spec.arms import OFFLOADS, Arm
from study.theory.architecture import flops_per_row
from study.theory.deepspeed_memory import Engine
from study.theory.estimate import disk_bytes, estimate, traffic
from study.theory.memory_kinds import memory_kinds
from study.theory.question import Given, Question
from study.theory.setup import arm_named
from study.theory.steptime import step_s


class Prediction(NamedTuple):
    """A value, and the ends of its interval where theory gives one."""

    value: float
    interval: tuple[float, float] | None


class Moved(NamedTuple):
    """What the time of a step depends on, of all that an estimate has."""

    flops_per_rank_and_step: float
    traffic: dict[str, int]
    nvme_bytes: dict[str, int]


def memory(training: Training, kind: MemoryKind | None) -> Prediction:
    """Bytes that a GPU holds at the peak of a step, of the kind that was read. Unsaid: allocated, as programs print."""
    if kind in (None, "allocated"):
        return Prediction(float(estimate(training.setup).peak_bytes), None)
    held = memory_kinds(training.setup, training.machine and training.machine.gpu)
    if getattr(held, kind) is None:
        raise NoSetup(f"memory as {kind} is not predicted for a model of formulas")
    return Prediction(float(getattr(held, kind)), None)


def step(training: Training) -> Prediction:
    """Seconds of a step, from when everything overlaps at the best pace to when nothing does at the worst.

    FSDP is taken for the ZeRO stage that shards as much.
    """
    setup, machine = training.setup, training.machine
    if machine is None:
        raise NoSetup(training.no_machine)
    setup = replace(setup, precision=setup.precision.replace("bf16_pure", "bf16_cast"))
    if setup.fsdp:
        twin = arm_named("zero3_textbook" if setup.fsdp == "full_shard" else "zero2").deepspeed
        setup = replace(setup, deepspeed=twin, fsdp=None, precision="bf16_cast")
    once = flops_per_row(setup.model, setup.sequence) * setup.micro_batch * setup.accumulation
    engine = Engine(setup)
    moved = Moved(once * 4 / 3 if setup.checkpointing else once, traffic(engine), disk_bytes(engine))
    given = Given(
        sequence=setup.sequence,
        batch=setup.micro_batch * setup.accumulation * setup.ranks,
        precision=setup.precision,
        checkpointing=setup.checkpointing,
        disk_bytes_per_s=6e9,
        gpus_per_node=machine.gpus_per_node,
    )
    zero = (setup.deepspeed or {}).get("zero_optimization", {})
    homes = [zero.get(part, {}).get("device", "none") for part in OFFLOADS]
    arm = Arm("", Path(), "DEEPSPEED" if setup.deepspeed else "NO", 1, setup.deepspeed, zero.get("stage"), *homes)
    question = Question.of(setup.model, machine.gpus, machine.gpu, given)
    low, high = step_s(question, arm, moved, setup.micro_batch)[0]
    return Prediction(math.sqrt(low * high), (low, high))
