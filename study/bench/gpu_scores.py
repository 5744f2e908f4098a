"""Compares predictions with what a GPU measured: memory as PyTorch and the driver count it, and seconds of a step."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from study.bench.prediction import setup_of
from study.errors import Stop
from study.io.numbers import size
from study.machine.gpus import gpu_named
from study.predictor.memory.memory_kinds import memory_kinds
from study.predictor.outside.errors import Compared, Errors
from study.predictor.outside.stored import predictions
from study.predictor.outside.tables import percent
from study.predictor.timing.steptime import Machine, step_time
from study.records.runs import Run

MEMORY = {
    "allocated": "peak_allocated_bytes",
    "reserved": "peak_reserved_bytes",
    "driver": "device_used_bytes",  # read after the timed steps, when PyTorch may have given back a part of its peak
}
NAMES = (*MEMORY, "step")


@dataclass(frozen=True)
class Scored:
    """A run on a GPU, and what was predicted of it. A quantity without a prediction is missing."""

    run: Run
    quantities: dict[str, Compared]


def scored(runs: Iterable[Run]) -> list[Scored]:
    """Every finished run on a GPU whose model is known, with the quantities that have a prediction."""
    on_gpu = [run for run in runs if run.done and run.device == "cuda"]
    return [each for each in map(_scored, on_gpu) if each.quantities]


def _scored(run: Run) -> Scored:
    setup, gpu = setup_of(run.record, look=True), _gpu(run)
    if setup is None:
        return Scored(run, {})
    predicted, quantities = memory_kinds(setup, gpu), {}
    for name, field in MEMORY.items():
        measured = max((getattr(rank, field) or 0 for rank in run.record.memory.per_rank), default=0)
        # A rank that runs alone has no NCCL, which is in the prediction of what the driver shows.
        ours = None if name == "driver" and run.virtual else getattr(predicted, name)
        if measured and ours is not None:
            quantities[name] = Compared("memory", float(ours), float(measured), None)
    # A virtual rank sends nothing, so its step lacks that time. No record has the speed of a disk.
    if gpu and run.median_step_s and not run.virtual and run.record.observed.offload_optimizer != "nvme":
        step = step_time(setup, Machine(gpu=gpu, gpus_per_node=_gpus_per_node(run)))
        quantities["step"] = Compared("time", step.seconds, run.median_step_s, (step.low_s, step.high_s))
    return Scored(run, quantities)


def _gpu(run: Run) -> str | None:
    """The name in GPUS of the run's GPU; None if it is unknown."""
    devices = run.record.hardware.devices
    try:
        return gpu_named(devices[0].name) if devices else None
    except Stop:
        return None


def _gpus_per_node(run: Run) -> int:
    machines = run.record.machines
    return max((len(machine.ranks) for machine in machines), default=run.ranks or 1)


def lines(everything: list[Scored]) -> list[dict]:
    """A row for each run: what was measured, and how far off the prediction is."""
    return [_line(each) for each in everything]


def _line(each: Scored) -> dict:
    run = each.run
    about = {"cell": f"{run.model} {run.arm}", "ranks": f"{run.ranks} virtual" if run.virtual else run.ranks}
    about |= {"precision": run.precision, "rows": run.micro_batch, "passes": run.accumulation, "tokens": run.sequence}
    for name in NAMES:
        quantity = each.quantities.get(name)
        about[name] = None
        if quantity is not None:
            measured = f"{quantity.measured:.3g} s" if name == "step" else size(quantity.measured)
            about[name] = f"{measured} ({quantity.error:+.1%})"
    return about


def errors(everything: list[Scored]) -> list[dict]:
    """A row for each quantity: how far off its predictions are here, and those of published measurements."""
    if not everything:
        return []
    rows = []
    for name in NAMES:
        of_name = [each.quantities[name] for each in everything if name in each.quantities]
        if of_name:
            rows.append({"quantity": name, "measured": "these runs"} | _errors(Errors.of(of_name)))
    for name, errors_of_name in _published().items():
        rows.append({"quantity": name, "measured": "published"} | _errors(errors_of_name))
    return rows


@functools.cache
def _published() -> dict[str, Errors]:
    """Return the errors over what others measured: memory, and the rows of time that nothing was fitted to."""
    groups: dict[str, list[Compared]] = {"memory": [], "step": []}
    for member in predictions():
        for compared in member.quantities:
            if compared.quantity == "memory":
                groups["memory"].append(compared)
            elif member.row.role != "fit":
                groups["step"].append(compared)
    return {name: Errors.of(members) for name, members in groups.items() if members}


def _errors(errors: Errors) -> dict:
    return {
        "cells": errors.count,
        "off by (median)": percent(errors.median_absolute),
        "worst": f"{errors.worst:+.0%}",
        "within 10 %": percent(errors.within_10),
        "within 30 %": percent(errors.within_30),
        "in the interval": percent(errors.inside),
    }
