"""`study estimate`: predicts what a rank holds and moves, whether it fits, and the time of a step."""

import dataclasses
from typing import Annotated, Literal

import tyro

from study.cli.asked import Passes, Place, Training, setup_of
from study.errors import Stop
from study.io.numbers import number_of, size
from study.io.tables import say, say_wrapped, show
from study.machine.gpus import GPUS
from study.predictor.advice.advise import MISS, fills
from study.predictor.estimate import Estimate
from study.predictor.estimate import estimate as predict
from study.predictor.memory.memory_kinds import MemoryKinds, memory_kinds, reserve_bytes
from study.predictor.papers import recipe_of, states_bytes
from study.predictor.setup import Setup
from study.predictor.step_time import Machine, StepTime, step_time
from study.predictor.wanted import Wanted, asked_for, count_of
from study.report.advice import of_card, recompute_note
from study.report.outside import accuracy
from study.spec import arms
from study.spec.optimizers import refusal
from study.spec.options import AsJson
from study.spec.shapes import with_size

Fits = Literal["yes", "only just", "no"]
FITS = {"yes": "It fits on {}.", "only just": "It fits only just on {}.", "no": "It does not fit on {}."}
BAR = 40  # characters of the longest phase


def fits_on(gpu: str, peak_bytes: float) -> Fits:
    """Return whether a peak fits on a GPU. An advice keeps a reserve free."""
    headroom_bytes = GPUS[gpu].memory_bytes - reserve_bytes(GPUS[gpu]) - peak_bytes
    if headroom_bytes < 0:
        return "no"
    return "yes" if headroom_bytes >= MISS * peak_bytes else "only just"


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What is predicted for a rank."""

    arm: str
    setup: Setup
    whole: Estimate
    kinds: MemoryKinds
    machine: Machine | None
    step: StepTime | None

    @property
    def gpu(self) -> str | None:
        return self.machine.gpu if self.machine else None

    @property
    def fits(self) -> Fits | None:
        """Return whether it fits on the GPU, by the rule of an advice. None: no GPU."""
        if self.gpu is None:
            return None
        answer = fits_on(self.gpu, self.whole.peak_bytes)
        return "only just" if answer == "yes" and fills(self.gpu, self.kinds.driver) else answer


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

    With --gpu the answer says whether it fits, and the time of a step. With --params alone, only the ZeRO paper's model
    states are given.

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
    if _is_only_a_number(wanted):
        return _states(passes.arm, training, place, count_of(wanted.params or 0), as_json)
    prediction = _predicted(asked_for(wanted, training.sequence or 1), training, place, passes, buckets)
    if as_json:
        return _as_dict(prediction)
    _show(prediction, timeline)
    return None


def _is_only_a_number(wanted: Wanted) -> bool:
    """Return whether a number of parameters is all that is known of a model. A text such as 7B may name a shape."""
    if wanted.params is None or wanted != Wanted(params=wanted.params):
        return False
    return not (isinstance(wanted.params, str) and with_size(wanted.params))


def _predicted(model, training: Training, place: Place, passes: Passes, buckets: int | None) -> Prediction:
    setup, machine = setup_of(model, training, place, passes, buckets)
    step = step_time(setup, machine) if machine else None
    kinds = memory_kinds(setup, machine.gpu if machine else None)
    return Prediction(passes.arm, setup, predict(setup), kinds, machine, step)


def _states(name: str, training: Training, place: Place, parameters: float, as_json: bool) -> dict | None:
    """Print the ZeRO paper's model states, or return them: all that is known of a number of parameters."""
    if place.gpu is not None:
        what = "the time of a step depends on the model's layers"
        raise Stop(what, "give --layers and --hidden, or leave out --gpu")
    arm = arms.load_arm(name)
    gpus = 8 if training.gpus is None else training.gpus
    stage = 3 if arm.fsdp else arm.stage or 0
    recipe = recipe_of(training.precision or "bf16_cast", training.optimizer)
    states = states_bytes(parameters, stage, gpus, recipe)
    if as_json:
        return {"arm": name, "ranks": gpus, "parameters": parameters, "published_states_bytes": states}
    total = size(sum(states.values()))
    say_wrapped(f"Model states alone take {total} on each of {number_of(gpus, 'ranks')}, by the ZeRO paper.", "")
    show([{"states": part, "per rank": size(part_bytes)} for part, part_bytes in states.items()])
    return None


def _as_dict(prediction: Prediction) -> dict:
    times = None
    if step := prediction.step:
        times = {name: getattr(step, name) for name in ("seconds", "low_s", "high_s", "limit", "parts")}
        times["phases"] = [dataclasses.asdict(phase) for phase in step.phases]
    return {
        "arm": prediction.arm,
        "ranks": prediction.setup.ranks,
        "parameters": prediction.whole.parameters,
        "estimate": dataclasses.asdict(prediction.whole),
        "kinds": dataclasses.asdict(prediction.kinds),
        "fits": prediction.fits,
        "step": times,
    }


def _show(prediction: Prediction, timeline: bool) -> None:
    whole = prediction.whole
    say_wrapped(_answer(prediction), *recompute_note(prediction.setup), "")
    say(f"at the peak ({whole.peak_when}), buffers and temporaries included:")
    sizes = whole.at_peak | {"total": whole.peak_bytes}
    show([{"component": part, "per rank": size(part_bytes)} for part, part_bytes in sizes.items()])
    moved = ", ".join(f"{kind} {size(moved_bytes)}" for kind, moved_bytes in whole.traffic.items()) or "none"
    say("", f"host memory: {size(whole.host_bytes)}; collectives of a step: {moved}")
    if prediction.step:
        say(f"time, predicted: {in_words(prediction.step)}")
        say(*_drawn(prediction.step) if timeline else ())
    say_wrapped("", accuracy(), *prediction.setup.model.remarks())


def _answer(prediction: Prediction) -> str:
    """Return the peak of a rank, what nvidia-smi will show, and whether it fits, in a sentence or two."""
    peak = size(prediction.whole.peak_bytes)
    text = (
        f"A rank of {prediction.setup.ranks} under {prediction.arm} needs {peak} of GPU memory at the peak, predicted"
    )
    gpu = prediction.gpu
    if gpu is None or prediction.fits is None:
        return f"{text}."
    if prediction.kinds.driver is not None and prediction.fits != "no":
        text += f"; nvidia-smi will show {of_card(prediction.kinds.driver, gpu)}"
    free = f"{size(GPUS[gpu].memory_bytes)}, less {size(reserve_bytes(GPUS[gpu]))} for context and fragmentation"
    return f"{text}. {FITS[prediction.fits].format(f'{gpu} ({free})')}"


def in_words(step: StepTime) -> str:
    """Return `1.27 s per step (1.1 to 1.5 s, limited by compute)`."""
    return f"{step.seconds:.3g} s per step ({step.low_s:.2g} to {step.high_s:.2g} s, limited by {step.limit})"


def _drawn(step: StepTime) -> list[str]:
    """Return a bar for each resource of each phase, as long as its seconds."""
    longest_s = max(phase.seconds for phase in step.phases)
    lines = [""]
    for phase in step.phases:
        lines.append(f"{phase.name}, {phase.seconds:.3g} s")
        for resource, busy_s in (("GPU", phase.gpu_s), ("host", phase.host_s), ("link", phase.link_s)):
            lines.append(f"  {resource:5}{'#' * round(BAR * busy_s / longest_s):{BAR + 1}}{busy_s:.3g} s")
    return lines
