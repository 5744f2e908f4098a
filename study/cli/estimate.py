"""`study estimate`: what a rank of a training holds and moves, whether it fits, and how long a step takes."""

from dataclasses import asdict, dataclass, replace
from typing import Literal

from study.core import arms, optimizers
from study.core.errors import Stop, refuse_beyond
from study.core.settings import flag
from study.core.text import say, say_wrapped, show
from study.predict.front import (
    MOST_ROWS,
    Hardware,
    PlaceFlags,
    Prediction,
    Question,
    StepFlags,
    Training,
    TrainingFlags,
    Transformer,
    Wanted,
    asked_for,
    calibration,
    fits_on,
    settled_arm,
    usual_precision,
)
from study.report import advice as answer
from study.report import estimates

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True, kw_only=True)
class PassFlags:
    """The arm, and the micro-batches of a step."""

    arm: str = "zero3"
    """Name of an arm, which `study arms` lists; or the .yaml file of another."""
    micro_batch: int = 1
    """Sequences of a micro-batch, on each GPU."""
    accumulation: int = 1
    """Micro-batches of a step (gradient accumulation)."""
    checkpointing: bool = False
    """Recompute activations in the backward pass."""

    def __post_init__(self) -> None:
        for name in ("micro_batch", "accumulation"):
            refuse_beyond(flag(name), getattr(self, name), MOST_ROWS)


def training_of(
    model: Transformer,
    training: TrainingFlags,
    place: PlaceFlags,
    passes: PassFlags,
    buckets: int | None,
    device: Device = "cuda",
) -> tuple[Training, Hardware | None]:
    """Return the training under an arm, and the machine; None if its kind of GPU is not given."""
    if device == "cpu" and place.gpu:
        raise Stop(f"--device cpu has no --gpu (got {place.gpu})", "leave one of them out")
    arm = arms.load_arm(passes.arm)
    if arm.distributed_type == "NO":
        training = replace(training, gpus=1)  # whatever --gpus says: this arm uses one
    known = place
    is_known = place.gpu or (place.machine and calibration.read(place.machine).gpu)
    if not is_known:
        if place.link or place.gpus_per_node or place.disk or place.gpu_memory:
            raise Stop("options of a machine need its kind of GPU", "give --gpu")
        # One node: without a machine nobody has said how large its nodes are. The kind of GPU changes no number, as no
        # time is asked for.
        known = replace(place, gpu="H100", gpus_per_node=training.ranks, machine=None)
    question = Question.of(model, training, known, StepFlags(checkpointing=passes.checkpointing))
    arm = settled_arm(arm, question.gpus, question.local, buckets)
    machine = question.machine if is_known else None
    ours = question.training(arm, passes.micro_batch, passes.accumulation)
    if device == "cpu":  # the rows of a virtual rank's step, and those that were read of them, are in the same memory
        ours = replace(ours, placement=replace(ours.placement, device=device))
        ours = replace(ours, data_bytes=(2 * passes.accumulation - 1) * ours.traced.inputs_bytes)
        machine = calibration.on_cpu(place.machine, ours.placement.ranks)
    return ours, machine


def _unread(given: TrainingFlags, place: PlaceFlags, arm: arms.Arm, ranks: int, buckets: int | None) -> list[str]:
    """Return the options that were given and change nothing here, each with the reason."""
    unread = []
    if arm.distributed_type == "NO" and given.ranks != ranks and given.gpus is not None:
        unread.append(f"--gpus {given.gpus} ({arm.name} uses one)")
    if place.link and ranks == 1:
        unread.append("--link (a GPU alone has none)")
    if place.disk and not arm.uses_nvme:
        unread.append(f"--disk ({arm.name} keeps nothing there)")
    if buckets is not None and arm.deepspeed is None:
        unread.append(f"--buckets ({arm.name} has none of DeepSpeed)")
    if place.attention_kernel != PlaceFlags.attention_kernel and place.gpu is None:
        unread.append("--attention-kernel (it changes the time, which needs --gpu)")
    return [f"Not read: {', '.join(unread)}."] if unread else []


def estimate(
    model: Wanted,
    training: TrainingFlags,
    place: PlaceFlags,
    passes: PassFlags,
    *,
    buckets: int | None = None,
    device: Device = "cuda",
) -> dict:
    """Predict the memory of one rank and the bytes that it moves in a step. Nothing is run.

    With --gpu the answer says whether it fits, and the time of a step; with --machine the time on that machine.

    With --json: the same, busy seconds by resource, and the time of each phase.
    Example: `study estimate --model llama3-8b --gpu H100`

    Args:
        model: The model.
        training: The training.
        place: The machine.
        passes: The arm and its micro-batches.
        buckets: Elements of DeepSpeed's buckets. Default: as the arm's file says.
        device: cpu: what a rank holds on a machine without a GPU, as `study virtual` measures it there.
    """
    arm = arms.load_arm(passes.arm)
    # The predictor would give numbers for what the library refuses to train.
    precision = training.precision or usual_precision(arm)
    if stop := optimizers.refusal(arm, training.optimizer, precision):
        raise stop
    ours, machine = training_of(asked_for(model, training.sequence or 1), training, place, passes, buckets, device)
    needs = _needs(arm, precision, training.precision is None, ours, machine)
    unread = _unread(training, place, arm, ours.placement.ranks, buckets)
    say_wrapped(*estimates.in_words(needs), *unread, *answer.card_note(place))
    say_wrapped(*answer.recompute_note(passes.checkpointing, ours.model, arm.stage), "")
    say(f"at the peak ({needs.estimate.peak_when}), buffers and temporaries included:")
    show(estimates.table(needs.estimate))
    say_wrapped("", *estimates.moved(needs))
    say_wrapped("", *estimates.resting_on(needs))
    return {
        "arm": arm.name,
        "ranks": ours.placement.ranks,
        "parameters": ours.model.parameters,
        "estimate": asdict(needs.estimate),
        "kinds": asdict(needs.kinds) if needs.kinds else None,
        "step": asdict(needs.step) if needs.step else None,
        "fits": needs.on_gpu.fits if needs.on_gpu else None,
    }


def _needs(arm: arms.Arm, precision: str, is_usual: bool, ours: Training, machine: Hardware | None) -> estimates.Needs:
    """Return what a rank needs; with a machine also whether it fits there, and the time of a step."""
    prediction = Prediction(ours)
    whole, kinds, on_gpu, step = prediction.memory, None, None, None
    if ours.placement.on_gpu:
        kinds = prediction.kinds(machine.gpu if machine else None)
    if machine and kinds:
        if arm.uses_nvme and not machine.disk_bytes_per_s:
            remedy = "give --disk, such as 6GB/s (study calibrate --disk measures yours), or leave --gpu out"
            raise Stop(f"the time of {arm.name} depends on the disk", remedy)
        on_gpu = estimates.FitsGpu(machine.gpu, fits_on(machine.gpu, whole.peak_bytes, kinds.driver))
    if machine:
        step = prediction.step(machine)
    return estimates.Needs(arm.name, precision, is_usual, ours, whole, kinds, on_gpu, step)
