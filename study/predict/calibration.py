"""What a machine's own steps say of it: the content of machine.json, which `study calibrate` writes, and the constants
that bring predictions of these steps to what they took.

Whole steps are timed. Kernels, copies and CPU-Adam alone say less: of 56 steps in four sets of runs half were 26 % off,
with one ZeRO-2 step and one that offloads 10 %, with a plain step alone 22 %, with the time of a kernel 19 %.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, Field

from study.core import files
from study.core.arms import all_paths, load_arm
from study.core.errors import Stop
from study.core.gpus import CPU, GPUS, Gpu
from study.core.recipes import RECIPES, Precision
from study.core.settings import MACHINE
from study.predict.architecture import named
from study.predict.pace import Pace, pace
from study.predict.placement import Placement
from study.predict.prediction import step_time
from study.predict.step_time import Hardware
from study.predict.training import Batch, Training

MOST_BYTES = 2**20  # of a machine.json: ours have 2 kB
# What steps of known hosts took over what is predicted: it holds 80 % of those of a machine without a vote, of four
# (`next_source` in tools/fit.py).
INTERVAL = (0.5409, 1.368)
MOST_FACTOR = 16  # between a constant and the same of a machine
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class MeasuredStep(BaseModel, frozen=True):
    """A timed step of an arm: the median, the shortest and the longest."""

    arm: str
    ranks: Annotated[int, Field(ge=1, le=65536)]
    model: str
    precision: Precision
    micro_batch: Annotated[int, Field(ge=1, le=10**6)]
    sequence: Annotated[int, Field(ge=1, le=10**6)]
    step_s: Seconds
    low_s: Seconds
    high_s: Seconds


class CalibratedMachine(BaseModel, frozen=True):
    """The content of machine.json."""

    measured_utc: str
    gpu: str | None  # a name of the study's. None: a CPU
    cpu: str | None
    cores: int
    busy: bool  # others computed on it
    disk_bytes_per_s: Seconds | None = None  # the slower of reading and writing
    steps: list[MeasuredStep]


class Timed(NamedTuple):
    arm: str
    training: Training
    seconds: float


class Known(NamedTuple):
    """A machine as predictions take it."""

    gpu: Gpu
    pace: Pace


def read(path: Path) -> CalibratedMachine:
    """Read a machine.json. Raise Stop for anything else."""
    remedy = "give the machine.json that study calibrate wrote on that machine"
    what = "a machine.json"
    machine = files.load(path, CalibratedMachine, what=what, remedy=remedy, most_bytes=MOST_BYTES, links=True)
    unknown = [step.arm for step in machine.steps if step.arm not in all_paths()]
    if unknown or (machine.gpu and machine.gpu not in GPUS):
        raise Stop(f"{path} names {[*unknown, machine.gpu][0]!r:.80}, which is unknown here", remedy)
    return machine


def from_environment() -> Path | None:
    return Path(os.environ[MACHINE]) if os.environ.get(MACHINE) else None


def timed(machine: CalibratedMachine) -> list[Timed]:
    """The trainings of a machine's steps."""
    trainings = []
    for step in machine.steps:
        placement = Placement.of(load_arm(step.arm), step.ranks, "cuda" if machine.gpu else "cpu")
        batch = Batch(step.micro_batch, 1, step.sequence)
        training = Training(named(step.model), RECIPES[step.precision], batch, placement)
        trainings.append(Timed(step.arm, training, step.step_s))
    return trainings


def known(machine: CalibratedMachine) -> Known:
    """The constants of a machine."""
    return fitted(GPUS[machine.gpu] if machine.gpu else CPU, timed(machine))


def on_cpu(path: Path | None, ranks: int) -> Hardware | None:
    """This CPU as predictions take it. None: no machine.json says how fast it is."""
    here = read(path) if path else None
    return None if here is None or here.gpu else hardware(known(here), ranks)


def fitted(gpu: Gpu, references: Sequence[Timed]) -> Known:
    """The constants that bring predictions of a machine's steps to what they took, one after the other."""
    of = replace(pace(), interval=dict.fromkeys(pace().interval, INTERVAL), width=dict.fromkeys(pace().width, 1.0))
    now = Known(gpu, of)
    changes = {"zero2": _host, "fsdp2": _fsdp, "zero2_cpu": _host_update}
    if gpu is CPU:  # which has no datasheet here: a plain step says its speed. Beside a GPU it decides nothing
        changes = {"single": _speed} | changes | {"zero2": _python}
    alone = {each.arm: each for each in references if gpu is CPU or each.training.placement.ranks == 1}
    for arm, change in changes.items():
        if arm in alone:
            now = _brought(now, alone[arm], change)
    several = [each for each in references if gpu is not CPU and each.training.placement.ranks > 1]
    return _brought(now, several[0], _links) if several else now


def _brought(now: Known, reference: Timed, change: Callable[[Known, float], Known]) -> Known:
    """Change a constant so that a step takes as long as measured, or as near as a possible factor brings it."""
    low, high = 1 / MOST_FACTOR, float(MOST_FACTOR)
    for _ in range(40):
        middle = sqrt(low * high)
        if _seconds(change(now, middle), reference.training) < reference.seconds:
            low = middle
        else:
            high = middle
    return change(now, middle)


def _seconds(of: Known, training: Training) -> float:
    return step_time(training, hardware(of, training.placement.ranks)).seconds


def hardware(of: Known, gpus_per_node: int) -> Hardware:
    return Hardware(gpu=of.gpu, gpus_per_node=gpus_per_node, pace=of.pace)


def _speed(now: Known, factor: float) -> Known:
    """A slower processor and memory."""
    gpu = now.gpu
    peaks = {kind: peak / factor for kind, peak in gpu.peaks.items()}
    return now._replace(gpu=replace(gpu, peaks=peaks, memory_bytes_per_s=gpu.memory_bytes_per_s / factor))


def _host(now: Known, factor: float) -> Known:
    """Slower launches, and Python that is counted in them."""
    launch = {name: factor * seconds for name, seconds in now.pace.launch.items()}
    return now._replace(pace=replace(now.pace, launch=launch))


def _python(now: Known, factor: float) -> Known:
    python = {name: factor * kernels for name, kernels in now.pace.python.items()}
    return now._replace(pace=replace(now.pace, python=python))


def _fsdp(now: Known, factor: float) -> Known:
    python = now.pace.python | {"fsdp": factor * now.pace.python["fsdp"]}
    return now._replace(pace=replace(now.pace, python=python))


def _host_update(now: Known, factor: float) -> Known:
    """An update on the host takes longer, with its copies: memory that is not pinned is slow."""
    return now._replace(pace=replace(now.pace, host_update=factor))


def _links(now: Known, factor: float) -> Known:
    of = now.pace
    return now._replace(pace=replace(of, link=of.link / factor, pcie=of.pcie / factor, network=of.network / factor))
