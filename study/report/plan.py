"""What an hour on a machine would do: the cells of a protocol in order, what is predicted of each, and its end."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from study.core.arms import load_arm
from study.core.errors import Stop
from study.core.gpus import Gpu
from study.core.settings import TrainerFlags, resolve
from study.core.shapes import config_of, shape_of
from study.core.text import rounded, short, size
from study.predict.front import (
    Estimate,
    Fits,
    Hardware,
    MemoryKinds,
    Pace,
    Placement,
    Prediction,
    StepTime,
    Training,
    Transformer,
    fits_on,
)
from study.report.of_record import of_settings
from study.sweeps.protocol import Cell

# From the launch to the first step and from the last one to the end: on one H100 or H200 13 to 50 s, 10 of them for
# Python. Of eight ranks it is assumed.
START_S = 40
MORE_STEPS = 4  # that instruments take after the timed ones
UNKNOWN_S = 90  # the steps of a cell whose seconds nothing predicts. Assumed
TIGHT = {"yes": "", "only just": " (tight)", "no": ""}
HOST_SHARE = 2  # the memory of a host over that of its GPUs, where the host is not at hand


@dataclass(frozen=True)
class PredictedCell:
    """What is predicted of a cell on a machine. `step` is None where ranks that run alone send nothing."""

    whole: Estimate
    kinds: MemoryKinds
    step: StepTime | None
    fits: Fits


@dataclass(frozen=True)
class Planned:
    """A cell of a plan: what is predicted of it, when it ends, and why it is left, if it is."""

    cell: Cell
    ranks: int
    predicted: PredictedCell | None
    seconds: float  # of its start and its steps
    ends_s: float = 0  # after the hour's begin; of one that is left, when it would have begun
    left: str = ""

    def row(self, minutes: float) -> dict[str, Any]:
        """Return the row of a table."""
        cell, predicted = self.cell, self.predicted
        step = predicted.step if predicted else None
        when = "" if self.left else f"{self.ends_s / 60:.0f} min"
        if not self.left and self.ends_s > 60 * minutes:
            when = "after the end"
        return {
            "part": cell.part,
            "arm": cell.arm,
            "ranks": self.ranks,
            "rows": cell.value("micro_batch"),
            "steps s": None if step is None else rounded(step.seconds * _steps(cell), ".3g"),
            "start s": START_S,
            "tensors": size(predicted.whole.peak_bytes) if predicted else None,
            "nvidia-smi": size(predicted.kinds.driver) + TIGHT[predicted.fits] if predicted else None,
            "decides": " ".join(cell.decides),
            "narrows": " ".join(cell.narrows),
            "done after": when,
        }


def training_of(cell: Cell, gpus: int) -> Training:
    """Return the training of a cell on GPUs. Raise Stop with status unavailable if it is not predicted."""
    settings = resolve(TrainerFlags(**cell.settings), gpu=True)
    name = shape_of(settings.model)
    model = Transformer.of(config_of(name), name, dropout=settings.dropout, lora_rank=settings.lora_rank)
    ranks = settings.virtual_ranks or cell.ranks or gpus
    return of_settings(settings, model, Placement.of(load_arm(cell.arm), ranks, "cuda"))


def predicted(cell: Cell, gpu: Gpu, gpus: int, of: Pace | None = None) -> PredictedCell | None:
    """Return what is predicted of a cell, by the constants of a machine or else the fitted ones.

    None if nothing is: of arms for CUDA alone, and of models of others.
    """
    try:
        prediction = Prediction.of(training_of(cell, gpus))
        whole, kinds = prediction.memory, prediction.kinds(gpu)
    except Stop as stop:
        if stop.status != "unavailable":
            raise
        return None
    step = None
    if cell.value("virtual_ranks") is None and not load_arm(cell.arm).uses_nvme:
        ranks = prediction.training.placement.ranks
        step = prediction.step(Hardware(gpu=gpu, gpus_per_node=ranks, host="new", pace=of))
    return PredictedCell(whole, kinds, step, fits_on(gpu, whole.peak_bytes, kinds.driver))


def plan(
    cells: Sequence[Cell], gpu: Gpu, gpus: int, host_bytes: float | None = None, of: Pace | None = None
) -> list[Planned]:
    """Return the cells in their order, each with its end, and those that are left with the reason."""
    host_bytes = host_bytes or HOST_SHARE * gpus * gpu.memory_bytes
    planned = [_planned(cell, gpu, gpus, host_bytes, of) for cell in cells]
    unfit = {each.cell.part for each in planned if each.left}
    needed = [_unless_fit(each, unfit) for each in planned]
    return list(_ending(needed, lanes(needed, gpus, host_bytes)))


def _planned(cell: Cell, gpu: Gpu, gpus: int, host_bytes: float, of: Pace | None) -> Planned:
    known = predicted(cell, gpu, gpus, of)
    alone = load_arm(cell.arm).distributed_type == "NO" or cell.value("virtual_ranks")
    ranks = 1 if alone else cell.ranks or gpus
    seconds = max(START_S + UNKNOWN_S, cell.reserve_s)
    left = ""
    if known:
        if known.step:
            seconds = START_S + _steps(cell) * known.step.seconds
        taken_bytes = known.whole.host_bytes * ranks
        if known.fits == "no":
            left = f"{size(known.whole.peak_bytes)} are predicted, which do not fit on {gpu.kind}"
        elif taken_bytes > host_bytes:
            left = f"{size(taken_bytes)} of host memory are predicted, and there are {size(host_bytes)}"
    if gpus < (cell.ranks or 1):
        left = f"it needs {cell.ranks} GPUs"
    return Planned(cell, ranks, known, seconds, left=left)


def _unless_fit(planned: Planned, unfit: set[str]) -> Planned:
    """Return a cell that stands in for another part's, left if all of that part fit."""
    part = planned.cell.instead_of
    if planned.left or part is None or part in unfit:
        return planned
    return replace(planned, left=f"it stands in for {part}, which fits")


def _steps(cell: Cell) -> int:
    return (cell.value("steps") or 0) + MORE_STEPS


def lanes(planned: Sequence[Planned], gpus: int, host_bytes: float) -> int:
    """Return how many cells for one GPU may run side by side: as many as cards, if the host holds their states."""
    alone = [each for each in planned if each.cell.ranks == 1 and not each.left]
    largest_bytes = max((each.predicted.whole.host_bytes for each in alone if each.predicted), default=0)
    at_once = int(host_bytes // largest_bytes) if largest_bytes else gpus
    return max(1, min(gpus, len(alone), at_once))


def _ending(planned: list[Planned], at_once: int) -> Iterator[Planned]:
    """Yield the cells with their ends. Those for one GPU take the lane that is free first."""
    free_s = [0.0] * at_once
    for each in planned:
        if each.left:
            yield replace(each, ends_s=max(free_s))
            continue
        if each.cell.ranks == 1 and at_once > 1:
            lane = free_s.index(min(free_s))
            free_s[lane] += each.seconds
            yield replace(each, ends_s=free_s[lane])
        else:
            free_s = [max(free_s) + each.seconds] * at_once
            yield replace(each, ends_s=free_s[0])


def in_words(planned: list[Planned], minutes: float, scripts: Sequence[dict] = ()) -> list[str]:
    """Say which claims the scripts and the cells before the hour's end decide and narrow, and where it ends."""
    inside = [each for each in planned if not each.left and each.ends_s <= 60 * minutes]
    outside = [each for each in planned if not each.left and each.ends_s > 60 * minutes]
    decided, narrowed = claims(planned, inside)
    decided += [claim for script in scripts for claim in script.get("decides", [])]
    steps_s = sum(each.seconds - START_S for each in inside)
    within = f"within {short(minutes)} minutes" if math.isfinite(minutes) else "without a limit of minutes"
    tight = [each for each in inside if each.predicted and each.predicted.fits == "only just"]
    of_them = f", {len(tight)} of them tight" if tight else ""
    lines = [
        f"{len(inside)} of {len(planned)} cells end {within}{of_them}, predicted:"
        f" {steps_s / 60:.0f} minutes of steps, and {len(inside)} starts of {START_S} s.",
        f"Decided: {', '.join(decided) or 'nothing'}. Narrowed: {', '.join(narrowed) or 'nothing'}.",
    ]
    if tight:
        lines.append("Tight: it fits only just, and may run out of memory.")
    if outside:
        first = outside[0].cell
        lines.append(f"The end comes before {first.part} with {first.arm} ends: what follows runs if time is left.")
    return lines + [f"Left: {each.cell.part}, {each.cell.arm}: {each.left}." for each in planned if each.left]


def claims(planned: list[Planned], inside: list[Planned]) -> tuple[list[str], list[str]]:
    """Return the claims that the cells inside the hour decide, and those that they only narrow.

    A claim is decided if each part that decides it is complete, or the part that stands in for it is.
    """
    parts = {each.cell.part: each.cell for each in planned}
    complete = parts.keys() - {each.cell.part for each in planned if each not in inside}
    for part in [*complete]:
        if original := parts[part].instead_of:
            complete.add(original)
    # A part that stands in for one that fits is not needed.
    needless = {part for part, cell in parts.items() if cell.instead_of in complete and part not in complete}
    lacking = {claim for part, cell in parts.items() if part not in complete | needless for claim in cell.decides}
    named = dict.fromkeys(claim for each in inside for claim in each.cell.decides)
    decided = [claim for claim in named if claim not in lacking]
    narrowed = dict.fromkeys([*named, *(claim for each in inside for claim in each.cell.narrows)])
    return decided, [claim for claim in narrowed if claim not in decided]


COLUMNS = ("gpu", "gpus", "cell", *("allocated_bytes", "reserved_bytes", "driver_bytes"), "step_s", "low_s", "high_s")


def registered(cells: Sequence[Cell], gpu: Gpu, gpus: int, of: Pace | None = None) -> Iterator[list]:
    """Yield the rows that are registered before a measurement: COLUMNS. A cell that nothing predicts has none."""
    for cell in cells:
        if known := predicted(cell, gpu, gpus, of):
            kinds, step = known.kinds, known.step
            seconds = (step.seconds, step.low_s, step.high_s) if step else ()
            times = [rounded(each, ".4g") for each in seconds] or [""] * 3
            yield [gpu.kind, gpus, cell.name, kinds.allocated, kinds.reserved, kinds.driver, *times]
