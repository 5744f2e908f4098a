"""`study estimate`: predicts what a rank holds and moves, whether it fits, and the time of a step."""

from dataclasses import asdict
from typing import Annotated, Literal

import tyro

from study.cli.asked import Passes, Place, Training, setup_of
from study.core import arms
from study.core.errors import Stop
from study.core.gpus import GPUS
from study.core.optimizers import refusal
from study.core.options import AsJson
from study.core.text import say, say_wrapped, show, size
from study.predict.front import (
    MISS,
    Estimate,
    StepTime,
    Wanted,
    asked_for,
    fills,
    memory_kinds,
    reserve_bytes,
    step_time,
)
from study.predict.front import estimate as predict
from study.report.advice import accuracy, of_card, recompute_note

Fits = Literal["yes", "only just", "no"]
FITS = {"yes": "It fits on {}.", "only just": "It fits only just on {}.", "no": "It does not fit on {}."}
BAR = 40  # characters of the longest phase


def fits_on(gpu: str, peak_bytes: float, driver_bytes: int | None = None) -> Fits:
    """Return whether a peak fits on a GPU, by the rule of an advice, which keeps a reserve free."""
    headroom_bytes = GPUS[gpu].memory_bytes - reserve_bytes(GPUS[gpu]) - peak_bytes
    if headroom_bytes < 0:
        return "no"
    return "only just" if headroom_bytes < MISS * peak_bytes or fills(gpu, driver_bytes) else "yes"


def estimate(
    wanted: Annotated[Wanted, tyro.conf.arg(name="")],
    training: Annotated[Training, tyro.conf.arg(name="")],
    place: Annotated[Place, tyro.conf.arg(name="")],
    passes: Annotated[Passes, tyro.conf.arg(name="")],
    *,
    buckets: int | None = None,
    timeline: bool = False,
    as_json: AsJson = False,
) -> dict | None:
    """Predict the memory of one rank and the bytes that it moves in a step. Nothing is run.

    With --gpu the answer says whether it fits, and the time of a step.

    Args:
        wanted: The model.
        training: The training.
        place: The machine.
        passes: The arm and its passes.
        buckets: Elements of DeepSpeed's buckets. Default: as the arm's file says.
        timeline: With --gpu: draw the phases of the step.
        as_json: Print the prediction as JSON.
    """
    arm = arms.load_arm(passes.arm)
    if stop := refusal(arm, training.optimizer, training.precision or "bf16_cast"):
        raise stop
    if timeline and place.gpu is None:
        raise Stop("--timeline needs a predicted time", "give --gpu")
    setup, machine = setup_of(asked_for(wanted, training.sequence or 1), training, place, passes, buckets)
    whole = predict(setup)
    kinds = memory_kinds(setup, machine.gpu if machine else None)
    step = step_time(setup, machine) if machine else None
    fits = fits_on(machine.gpu, whole.peak_bytes, kinds.driver) if machine else None
    if as_json:
        answer = {"arm": arm.name, "ranks": setup.ranks, "parameters": whole.parameters, "estimate": asdict(whole)}
        return answer | {"kinds": asdict(kinds), "step": step and asdict(step), "fits": fits}
    needs = (
        f"A rank of {setup.ranks} under {arm.name} needs {size(whole.peak_bytes)} of GPU memory at the peak, predicted"
    )
    verdict = _on_card(machine.gpu, kinds.driver, fits) if machine and fits else "."
    say_wrapped(needs + verdict, *recompute_note(setup.checkpointing, setup.model), "")
    _show(whole, step, timeline)
    say_wrapped("", accuracy(), *setup.model.remarks())
    return None


def _on_card(gpu: str, driver_bytes: int | None, fits: Fits) -> str:
    card = GPUS[gpu]
    free = f"{gpu} ({size(card.memory_bytes)}, less {size(reserve_bytes(card))} for context and fragmentation)"
    shown = f"; nvidia-smi will show {of_card(driver_bytes, gpu)}" if driver_bytes and fits != "no" else ""
    return f"{shown}. {FITS[fits].format(free)}"


def _table(name: str, parts: dict[str, float]) -> None:
    show([{name: part, "per rank": size(part_bytes)} for part, part_bytes in parts.items()])


def _show(whole: Estimate, step: StepTime | None, timeline: bool) -> None:
    say(f"at the peak ({whole.peak_when}), buffers and temporaries included:")
    _table("component", {**whole.at_peak, "total": whole.peak_bytes})
    moved = ", ".join(f"{kind} {size(moved_bytes)}" for kind, moved_bytes in whole.traffic.items()) or "none"
    say("", f"host memory: {size(whole.host_bytes)}; collectives of a step: {moved}")
    if step:
        low, high = f"{step.low_s:.2g}", f"{step.high_s:.2g}"
        say(f"time, predicted: {step.seconds:.3g} s per step ({low} to {high} s, limited by {step.limit})")
        say(*_drawn(step) if timeline else ())


def _drawn(step: StepTime) -> list[str]:
    """Return a bar for each resource of each phase, as long as its seconds."""
    longest_s = max(phase.seconds for phase in step.phases)
    lines = [""]
    for phase in step.phases:
        lines.append(f"{phase.name}, {phase.seconds:.3g} s")
        for resource, busy_s in (("GPU", phase.gpu_s), ("host", phase.host_s), ("link", phase.link_s)):
            lines.append(f"  {resource:5}{'#' * round(BAR * busy_s / longest_s):{BAR + 1}}{busy_s:.3g} s")
    return lines
