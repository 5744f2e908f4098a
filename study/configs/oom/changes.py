"""Which single change of a training would make it fit: predicted for the GPU of which the error tells the size."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from study.configs.oom.explain import ranks_that_share
from study.configs.oom.reading import OomError
from study.configs.oom.training import Described, KnownTraining
from study.core import arms
from study.core.errors import Stop
from study.core.gpus import GPUS, Gpu, gpu_named, like
from study.core.text import number_of, size
from study.predict.front import (
    PlaceFlags,
    Prediction,
    Question,
    StepFlags,
    TrainingFlags,
    Wanted,
    asked_for,
    default_sequence,
    fits_on,
    reserve_bytes,
    settled_arm,
)

HOLD_LESS = ("ddp", "zero1", "zero2", "zero3", "zero3_cpu")  # each holds less on a GPU than the one before it


def predicted(error: OomError, training: KnownTraining) -> str:
    """Return what a rank is predicted to need of this GPU, and which changes would fit. Empty: too little is said."""
    model, given = training.model, training.described
    if error.where != "GPU" or not error.total or model is None or given.missing:
        return ""
    try:
        needs_bytes = peak_bytes(training.wanted, given)
    except Stop:  # an arm whose memory is not predicted
        return ""
    rows = number_of(training.rows, f"sequences of {training.sequence or default_sequence(model):,} tokens")
    kept = "recomputed" if given.checkpointing else "kept"
    text = f"Predicted with {rows} per micro-batch and activations {kept}: a rank needs {size(needs_bytes)} at the peak"
    card = like(GPUS[gpu_named("H100")], error.total, None)  # memory depends on no more than its size
    text += f"; this GPU has {size(error.total)}, less {size(reserve_bytes(card))} for context and fragmentation"
    if fits_on(card, needs_bytes) != "no":
        return f"{text}. That fits{_although_it_fits(error, training)}"
    fitting = [*_fitting(card, training)]
    if not fitting:
        return f"{text}. No single change of micro-batch, recomputation or arm would fit: `study advise` tries several."
    return f"{text}. One of these would fit: {'; '.join(fitting)}."


def _although_it_fits(error: OomError, training: KnownTraining) -> str:
    """Return how a sentence goes on that says that a training fits."""
    if other := ranks_that_share(error, training):
        return f", but the size is that of states shared by {other}: did the launcher start {training.ranks}?"
    return ": something that was not given takes the rest, or differs."


def _fitting(card: Gpu, training: KnownTraining) -> Iterator[str]:
    """Yield the single changes that are predicted to fit, with what a rank needs then."""
    for words, change in single_changes(training.described):
        with contextlib.suppress(Stop):
            changed_bytes = peak_bytes(training.wanted, change)
            answer = fits_on(card, changed_bytes)
            if answer != "no":
                just = ", only just" if answer == "only just" else ""
                yield f"{words} ({size(changed_bytes)}{just})"


def peak_bytes(wanted: Wanted, given: Described) -> int:
    training = TrainingFlags(gpus=given.ranks, sequence=given.sequence)
    # One node, as nobody has said how large nodes are; no time is asked for.
    place = PlaceFlags(gpu="H100", gpus_per_node=training.ranks, machine=None)
    shape = asked_for(wanted, given.sequence or 1)
    step = StepFlags(batch=training.ranks, checkpointing=bool(given.checkpointing))
    question = Question.of(shape, training, place, step)
    arm = settled_arm(arms.load_arm(given.arm or ""), question.gpus, question.local)
    return Prediction.of(question.training(arm, given.micro_batch or 1, 1)).memory.peak_bytes


def single_changes(given: Described) -> Iterator[tuple[str, Described]]:
    """Yield changes of one thing each, the mildest first: fewer sequences, recomputation, an arm that holds less."""
    rows = given.micro_batch or 1
    while rows > 1:
        rows //= 2
        yield f"--micro-batch {rows}", replace(given, micro_batch=rows)
    if not given.checkpointing:
        yield "activations recomputed", replace(given, checkpointing=True)
    for arm in _arms_that_hold_less(given.arm):
        yield f"--arm {arm}", replace(given, arm=arm)


def _arms_that_hold_less(arm: str | None) -> tuple[str, ...]:
    if arm == "fsdp2":
        return ("fsdp2_cpu",)
    return HOLD_LESS[HOLD_LESS.index(arm) + 1 :] if arm in HOLD_LESS else ()
