"""Changes that would make a training fit, each with its predicted peak and the predicted time of a step."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from study.errors import Stop
from study.machine.gpus import GPUS
from study.oom.training import Training
from study.predictor.estimate import estimate
from study.predictor.memory.memory_kinds import outside_bytes
from study.predictor.setup import Setup, distribution
from study.predictor.timing.steptime import Machine, step_time
from study.spec import arms

LADDER = ("zero2", "zero3", "fsdp2", "zero2_cpu", "zero3_cpu")  # arms that hold less and less
ALONE = ("zero2_cpu", "zero3_cpu")  # of them, those that help a single GPU
MOST = 6


@dataclass(frozen=True)
class Proposal:
    """A change, its predicted peak, and whether it fits. The first one changes nothing."""

    change: str
    peak_bytes: int
    fits: bool
    step_s: float | None = None  # None if it does not fit


def proposals(training: Training, gpu: str) -> list[Proposal]:
    """Return the training as it is, and then the changes that fit, the fastest first."""
    now = _of("as it is", training.setup, gpu)
    better = []
    for change, setup in _changes(training):
        with contextlib.suppress(Stop):  # it has to be traced, and torch is not installed
            better.append(_of(change, setup, gpu))
    fitting = [each for each in better if each.fits and each.peak_bytes < now.peak_bytes]
    fitting.sort(key=lambda each: (each.step_s or 0, each.peak_bytes))
    return [now, *fitting[:MOST]]


def _of(change: str, setup: Setup, gpu: str) -> Proposal:
    peak = estimate(setup).peak_bytes
    fits = peak + outside_bytes(setup.ranks) <= GPUS[gpu].memory_bytes
    machine = Machine(gpu=gpu, gpus_per_node=min(setup.ranks, GPUS[gpu].per_node))
    return Proposal(change, peak, fits, step_time(setup, machine).seconds if fits else None)


def _changes(training: Training) -> Iterator[tuple[str, Setup]]:
    """Yield changes of the passes, then other arms, alone and with all changes that cost little."""
    setup = training.setup
    cheap: dict[str, dict[str, Any]] = {}
    if setup.loss == "whole" and setup.model.look.kind == "decoder":
        cheap["--loss chunked"] = {"loss": "chunked"}
    if not setup.checkpointing and setup.model.has_checkpointing:
        cheap["--checkpointing"] = {"checkpointing": True}
    if setup.micro_batch > 1:
        rows = setup.micro_batch // 2
        passes = setup.accumulation * 2
        yield f"--micro-batch {rows} --accumulation {passes}", replace(setup, micro_batch=rows, accumulation=passes)
    for change, values in cheap.items():
        yield change, replace(setup, **values)
    both: dict[str, Any] = {name: value for values in cheap.values() for name, value in values.items()}
    if len(cheap) > 1:
        yield " ".join(cheap), replace(setup, **both)
    for arm in LADDER if setup.ranks > 1 else ALONE:
        if arm == training.arm:
            continue
        try:
            other = replace(setup, **_distributed(arm, setup.ranks))
        except Stop:
            continue
        yield f"--arm {arm}", other
        if both:
            yield f"--arm {arm} {' '.join(cheap)}", replace(other, **both)


def _distributed(arm: str, ranks: int) -> dict[str, Any]:
    """Return the fields that say how an arm distributes, with the defaults of those that it does not have."""
    plain: dict[str, Any] = {"deepspeed": None, "fsdp": None, "fsdp_by": "torch", "fsdp_offload": False, "group": None}
    return plain | {"sequence_ranks": 1, "tensor_ranks": 1} | distribution(arms.load_arm(arm), ranks)
