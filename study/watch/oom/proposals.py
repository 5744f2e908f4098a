"""Changes that would make a training fit, each with its predicted peak and the predicted time of a step."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from study.core import arms
from study.core.errors import Stop
from study.core.gpus import GPUS
from study.predict.front import Machine, Setup, distribution, estimate, reserve_bytes, step_time
from study.watch.oom.training import Training

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
    now = _proposal("as it is", training.setup, gpu)
    better = []
    for change, setup in _changes(training):
        with contextlib.suppress(Stop):  # it has to be traced, and torch is not installed
            better.append(_proposal(change, setup, gpu))
    fitting = [each for each in better if each.fits and each.peak_bytes < now.peak_bytes]
    fitting.sort(key=lambda each: (each.step_s or 0, each.peak_bytes))
    return [now, *fitting[:MOST]]


def _proposal(change: str, setup: Setup, gpu: str) -> Proposal:
    peak = estimate(setup).peak_bytes
    fits = peak + reserve_bytes(GPUS[gpu]) <= GPUS[gpu].memory_bytes  # as an advice has it
    machine = Machine(gpu=gpu, gpus_per_node=min(setup.ranks, GPUS[gpu].per_node))
    return Proposal(change, peak, fits, step_time(setup, machine).seconds if fits else None)


def _changes(training: Training) -> Iterator[tuple[str, Setup]]:
    """Yield smaller passes, what costs little, and other arms, alone and with all that costs little."""
    setup = training.setup
    yield from _smaller_passes(setup)
    cheap = _cheap(setup)
    for change, values in cheap.items():
        yield change, replace(setup, **values)
    every = {name: value for values in cheap.values() for name, value in values.items()}
    if len(cheap) > 1:
        yield " ".join(cheap), replace(setup, **every)
    for arm, other in _other_arms(training):
        yield f"--arm {arm}", other
        if cheap:
            yield f"--arm {arm} {' '.join(cheap)}", replace(other, **every)


def _smaller_passes(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yield half the rows in twice the passes."""
    rows = setup.micro_batch // 2
    passes = setup.accumulation * 2
    if rows:
        yield f"--micro-batch {rows} --accumulation {passes}", replace(setup, micro_batch=rows, accumulation=passes)


def _cheap(setup: Setup) -> dict[str, dict[str, Any]]:
    """Return flags that cost little, and the fields of a setup that they mean."""
    cheap: dict[str, dict[str, Any]] = {}
    if setup.loss == "whole" and setup.model.look.kind == "decoder":
        cheap["--loss chunked"] = {"loss": "chunked"}
    if not setup.checkpointing and setup.model.look.has_checkpointing:
        cheap["--checkpointing"] = {"checkpointing": True}
    return cheap


def _other_arms(training: Training) -> Iterator[tuple[str, Setup]]:
    setup = training.setup
    for arm in LADDER if setup.ranks > 1 else ALONE:
        if arm != training.arm:
            with contextlib.suppress(Stop):  # the arm cannot train this
                yield arm, replace(setup, **_distributed(arm, setup.ranks))


def _distributed(arm: str, ranks: int) -> dict[str, Any]:
    """Return the fields that say how an arm distributes, with the defaults of those that it does not have."""
    plain: dict[str, Any] = {"deepspeed": None, "fsdp": None, "fsdp_by": "torch", "fsdp_offload": False, "group": None}
    return plain | {"sequence_ranks": 1, "tensor_ranks": 1} | distribution(arms.load_arm(arm), ranks)
