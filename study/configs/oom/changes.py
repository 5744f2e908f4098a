"""Which single change of a training would make it fit: predicted for the GPU of which the error tells the size."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from study.configs.oom.explain import Described, ranks_that_share
from study.configs.oom.reading import OomError
from study.core import arms
from study.core.errors import Stop
from study.core.gpus import GPUS, gpu_named, like
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

NEEDED = ("arm", "ranks", "micro_batch")  # of what is described
HOLD_LESS = ("ddp", "zero1", "zero2", "zero3", "zero3_cpu")  # each holds less on a GPU than the one before it


def predicted(error: OomError, wanted: Wanted, given: Described) -> str:
    """Return what a rank is predicted to need of this GPU, and which changes would fit. Empty: too little is said."""
    if error.where != "GPU" or not error.total or wanted == Wanted() or None in (getattr(given, k) for k in NEEDED):
        return ""
    try:
        shape = asked_for(wanted, given.sequence or 1)
        needs_bytes = peak_bytes(wanted, given)
    except Stop:  # an arm whose memory is not predicted
        return ""
    card = like(GPUS[gpu_named("H100")], error.total, None)  # memory depends on no more than its size
    rows = number_of(given.micro_batch or 1, f"sequences of {given.sequence or default_sequence(shape):,} tokens")
    kept = "recomputed" if given.checkpointing else "kept"
    text = f"Predicted with {rows} per micro-batch and activations {kept}: a rank needs {size(needs_bytes)} at the peak"
    text += f"; this GPU has {size(error.total)}, less {size(reserve_bytes(card))} for context and fragmentation"
    if fits_on(card, needs_bytes) != "no":
        trained = sum(tensor.elements for tensor in shape.tensors if tensor.trains)
        if other := ranks_that_share(error, given, trained):
            shared = f"the size is that of states shared by {other}: did the launcher start {given.ranks}?"
            return f"{text}. That fits, but {shared}"
        return f"{text}. That fits: something that was not given takes the rest, or differs."
    fitting = []
    for words, change in single_changes(given):
        with contextlib.suppress(Stop):
            changed_bytes = peak_bytes(wanted, change)
            answer = fits_on(card, changed_bytes)
            if answer != "no":
                just = ", only just" if answer == "only just" else ""
                fitting.append(f"{words} ({size(changed_bytes)}{just})")
    if not fitting:
        return f"{text}. No single change of micro-batch, recomputation or arm would fit: `study advise` tries several."
    return f"{text}. One of these would fit: {'; '.join(fitting)}."


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
    others = ["fsdp2_cpu"] if given.arm == "fsdp2" else []
    if given.arm in HOLD_LESS:
        others = [*HOLD_LESS[HOLD_LESS.index(given.arm) + 1 :]]
    for arm in others:
        yield f"--arm {arm}", replace(given, arm=arm)
