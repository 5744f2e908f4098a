"""Compares predictions with what a GPU measured: memory as PyTorch and the driver count it, and seconds of a step."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from study.bench.published_errors import summary
from study.errors import Stop
from study.io.numbers import size
from study.machine.gpus import gpu_named
from study.predictor.memory.memory_kinds import memory_kinds
from study.predictor.of_record import setup_of
from study.predictor.outside.stored import predictions
from study.predictor.outside.trainings import Compared
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
    """Return every finished run on a GPU whose model is known, with the quantities that have a prediction."""
    on_gpu = [Scored(run, _quantities(run)) for run in runs if run.done and run.device == "cuda"]
    return [each for each in on_gpu if each.quantities]


def _quantities(run: Run) -> dict[str, Compared]:
    setup = setup_of(run.record)
    if setup is None:
        return {}
    try:
        gpu = gpu_named(run.record.hardware.devices[0].name)
    except (Stop, IndexError):
        gpu = None
    predicted = memory_kinds(setup, gpu)
    quantities = {}
    for name, field in MEMORY.items():
        measured = max((getattr(rank, field) or 0 for rank in run.record.memory.per_rank), default=0)
        # A rank that runs alone has no NCCL, which is in the prediction of what the driver shows.
        ours = None if name == "driver" and run.virtual else getattr(predicted, name)
        if measured and ours is not None:
            quantities[name] = Compared("memory", float(ours), float(measured))
    # A virtual rank sends nothing, so its step lacks that time. No record has the speed of a disk.
    if gpu and run.median_step_s and not run.virtual and run.record.observed.offload_optimizer != "nvme":
        of_a_node = max((len(machine.ranks) for machine in run.record.machines), default=run.ranks or 1)
        step = step_time(setup, Machine(gpu=gpu, gpus_per_node=of_a_node))
        quantities["step"] = Compared("time", step.seconds, run.median_step_s, (step.low_s, step.high_s))
    return quantities


def lines(everything: list[Scored]) -> list[dict]:
    """Return a row for each run: what was measured, and how far off the prediction is."""
    rows = []
    for each in everything:
        run = each.run
        row = {"cell": f"{run.model} {run.arm}", "ranks": f"{run.ranks} virtual" if run.virtual else run.ranks}
        row |= {"precision": run.precision, "rows": run.micro_batch, "passes": run.accumulation, "tokens": run.sequence}
        row |= dict.fromkeys(NAMES)
        for name, quantity in each.quantities.items():
            measured = f"{quantity.measured:.3g} s" if name == "step" else size(quantity.measured)
            row[name] = f"{measured} ({quantity.error:+.1%})"
        rows.append(row)
    return rows


def errors(everything: list[Scored]) -> list[dict]:
    """Return a row for each quantity: how far off its predictions are here, and those of published measurements."""
    groups = [(name, [each.quantities[name] for each in everything if name in each.quantities]) for name in NAMES]
    own_groups = [(name, "these runs", members) for name, members in groups if members]
    published = [(name, "published", members) for name, members in _published().items()] if own_groups else []
    return [{"quantity": name, "measured": where} | summary(members) for name, where, members in own_groups + published]


@functools.cache
def _published() -> dict[str, list[Compared]]:
    """Return the predictions of what others measured: memory, and the rows of time that nothing was fitted to."""
    compared = [(member.row.role, quantity) for member in predictions() for quantity in member.quantities]
    memory = [quantity for _, quantity in compared if quantity.quantity == "memory"]
    step = [quantity for role, quantity in compared if quantity.quantity == "time" and role != "fit"]
    return {"memory": memory, "step": step}
