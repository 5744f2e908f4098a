"""Which single change of a training would make it fit: predicted for the GPU of which the error tells the size."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Literal, Self

from study.configs.oom.causes import UNUSED_SHARE, WIDTHS, Cause, clues, makes_moments
from study.configs.oom.explain import ranks_that_share
from study.configs.oom.reading import OomError
from study.configs.oom.said import CACHE, IN_FP32, IN_ONE_PIECE, NOT_RECOMPUTED
from study.configs.oom.training import Described, KnownTraining
from study.core import arms
from study.core.errors import Stop
from study.core.gpus import GPUS, Gpu, gpu_named, like
from study.core.text import binary_size, number_of, size
from study.predict.front import (
    Estimate,
    PlaceFlags,
    Prediction,
    Question,
    StepFlags,
    TrainingFlags,
    Transformer,
    Wanted,
    asked_for,
    default_sequence,
    fits_on,
    reserve_bytes,
    settled_arm,
)

# Causes that stand beside the tensor that was asked for: any change leaves more room.
BESIDE = ("oom-fragmentation", "oom-other-process")
# Causes that fill memory between the steps of a training, which may fit.
BETWEEN_STEPS = {
    "oom-evaluation": "evaluation",
    "oom-saving": "saving",
    "oom-loading": "loading",
    "oom-generation": "generation",
}
TOKENS = frozenset(("activations", "logits"))
IN_PIECES = "--chunked-loss, as by Liger"  # the loss
RECOMPUTED = "activations recomputed"
ROUNDED = 2**27  # bytes: less is within a digit of what is printed
LEAST_TAKEN = 2**30  # bytes: less is within what a prediction leaves for context and fragmentation
FAR = 1.2  # times the GPU
NEAR = 0.15  # of an excess: what takes about as much may be it
MOST_NEAR = 3
SAME = 0.01  # of an excess: what is exactly as much
# When a tensor is made, by the cause that a traceback names: in a pass, which the predictor calls "backward", or later.
MADE_IN = {
    "oom-logits": "backward",
    "oom-attention": "backward",
    "oom-activations": "backward",
    "oom-optimizer": "update",
}
STATES = frozenset(("optimizer", "gradients", "weights"))
# Each arm holds less on a GPU than the one before it: what it divides, or takes to the host, besides.
HOLD_LESS: dict[str, frozenset[str]] = {
    "ddp": frozenset(),
    "zero1": frozenset(("optimizer",)),
    "zero2": frozenset(("gradients",)),
    "zero3": frozenset(("weights",)),
    "zero3_cpu": STATES,
}
HOLD_LESS_OF_FSDP = {"fsdp2_grad_op": frozenset[str](), "fsdp2": frozenset(("weights",)), "fsdp2_cpu": STATES}
HOLD_LESS_OF_HSDP = {"hsdp": frozenset[str](), "fsdp2": STATES, "fsdp2_cpu": STATES}


@dataclass(frozen=True)
class Change:
    """A change of one thing, and the parts of memory that it makes smaller."""

    words: str
    training: Described
    shrinks: frozenset[str]

    def shrinks_part(self, cause: Cause) -> bool:
        """Whether it makes the part of memory smaller to which a cause belongs."""
        return not self.shrinks.isdisjoint(cause.part_of)


@dataclass(frozen=True)
class WhatFits:
    """What is predicted of a training, in words. Empty: too little is said."""

    words: str = ""
    may_fit: tuple[Change, ...] | None = None  # changes that fit, or could not be tried. None: none was looked at
    is_in_pieces: bool = False  # it fits, and with all in one piece the tensor would have had room


def helps_in_one_piece(error: OomError, training: KnownTraining) -> bool:
    """Whether what PyTorch holds without use would be enough for the tensor in one piece, which it is not yet."""
    return error.unallocated >= error.asked.high > 0 and IN_ONE_PIECE not in training.settings


def named(causes: list[Cause]) -> Cause:
    """Return the cause that a change has to shrink: the first that is of a tensor."""
    return next((cause for cause in causes if cause.id not in BESIDE), causes[0])


def predicted(error: OomError, training: KnownTraining, cause: Cause) -> WhatFits:
    """Return what a rank is predicted to need of this GPU, and which changes would fit."""
    model, given = training.model, training.described
    total_bytes = error.total or training.gpu_bytes
    if error.where != "GPU" or not total_bytes or model is None or training.missing:
        return WhatFits()
    try:
        prediction = prediction_of(training.wanted, given)
        needs_bytes = prediction.memory.peak_bytes
    except Stop as stop:  # an arm whose memory is not predicted, or what is traced where PyTorch is missing
        return WhatFits(f"Not predicted: {stop.sentence}")
    card = like(GPUS[gpu_named("H100")], total_bytes, None)  # memory depends on no more than its size
    if cause.id in BETWEEN_STEPS and (fitting := _steps_that_fit(card, training, model)):
        return WhatFits(f"{fitting}; the rest is {BETWEEN_STEPS[cause.id]}.")
    gpu = f"{binary_size(total_bytes, 4)} ({size(total_bytes)})"  # with the digits of the message
    has = f"this GPU has {gpu}, less {binary_size(reserve_bytes(card))} for context and fragmentation"
    later = _later(error, training, needs_bytes)
    needs = f"{_assumed(training, model)}: {_needs(training, needs_bytes)}; {has}.{later}"
    fit = fits_on(card, needs_bytes)
    if fit == "no":
        which, may_fit = _which_fit(card, training, error, cause, 0)
        return WhatFits(f"{needs} {which}", may_fit)
    if given.chunked_loss and "logits" in cause.part_of:  # the flag is of the next run
        return WhatFits(f"{needs} That fits: a loss in pieces never makes the whole logits, of which the message is.")
    made_in = next((MADE_IN[clue.cause] for clue in clues(error) if clue.cause in MADE_IN), "")
    rest = _Rest.of(error, prediction.most_bytes(made_in))
    fits = "That only just fits" if fit == "only just" else "That fits"
    words = f"{needs} {fits}{_although_it_fits(error, training, model, rest)}"
    if rest.where == "outside" or ranks_that_share(error, training):
        return WhatFits(words)
    is_in_pieces = helps_in_one_piece(error, training)
    is_of_tensors = rest.where != "unused" and rest.taken_bytes > 0
    if not is_of_tensors and fit == "yes":
        return WhatFits(words, is_in_pieces=is_in_pieces and rest.where == "unused")
    which, may_fit = _which_fit(card, training, error, cause, rest.taken_bytes if is_of_tensors else 0)
    if is_of_tensors:  # beside them little that is unused explains nothing
        is_much = error.unallocated >= UNUSED_SHARE * total_bytes
        is_in_pieces &= is_much and any(change.words == IN_ONE_PIECE for change in may_fit)
    then = "With that on top" if is_of_tensors else "If it fails again,"
    return WhatFits(f"{words} {then} {which[0].lower()}{which[1:]}", may_fit, is_in_pieces)


def far_beyond(error: OomError, training: KnownTraining) -> str:
    """Return that a training needs far more than its GPU has: which tensor came last says little then. Empty: not so.

    Where nobody says whether activations are recomputed, they are.
    """
    total_bytes = error.total or training.gpu_bytes
    is_said = error.where == "GPU" and total_bytes and training.model and not training.missing
    if not is_said or training.unfitting:
        return ""
    given = training.described
    with contextlib.suppress(Stop):
        least = replace(given, checkpointing=given.checkpointing is not False)
        needs_bytes = predicted_memory(training.wanted, least).peak_bytes
        if needs_bytes > FAR * total_bytes:
            needs, gpu = binary_size(needs_bytes), binary_size(total_bytes, 4)
            return f"The training as given needs {needs}, predicted, on a GPU of {gpu}."
    return ""


@dataclass(frozen=True)
class _Rest:
    """What took most of the memory that is predicted to be free. Nowhere: less than what was asked for."""

    where: Literal["tensors", "unused", "outside", "nowhere"]
    taken_bytes: int

    @classmethod
    def of(cls, error: OomError, needs_bytes: float) -> Self:
        not_predicted = round((error.allocated or 0) + error.asked.low - needs_bytes)
        taken_bytes = max(error.unallocated, error.outside, not_predicted)
        if taken_bytes < LEAST_TAKEN:
            return cls("nowhere", 0)
        if taken_bytes == error.unallocated:
            return cls("unused", taken_bytes)
        if taken_bytes == error.outside:
            return cls("outside", taken_bytes)
        # Of logits there are several copies, and which is asked for is not known.
        return cls("tensors" if taken_bytes >= error.asked.high else "nowhere", taken_bytes)


def _steps_that_fit(card: Gpu, training: KnownTraining, model: Transformer) -> str:
    """Return that the steps of a training fit, with activations kept if nobody says it. Empty: they do not."""
    said = training.described.checkpointing
    room_bytes = card.memory_bytes - reserve_bytes(card)
    for checkpointing in (False, True) if said is None else (said,):
        described = replace(training.described, checkpointing=checkpointing)
        needs_bytes = predicted_memory(training.wanted, described).peak_bytes
        if fits_on(card, needs_bytes) != "no":
            needs = f"{needs_bytes / 2**30:.1f} of {room_bytes / 2**30:.1f} GiB"
            return f"{_assumed(replace(training, described=described), model)}: the training fits ({needs})"
    return ""


def _which_fit(
    card: Gpu, training: KnownTraining, error: OomError, cause: Cause, more_bytes: int
) -> tuple[str, tuple[Change, ...]]:
    """Return which changes would fit, in words that mark those that shrink what is named, and which may.

    `more_bytes` are on the GPU beside what is predicted. `study advise` knows nothing of them.
    """
    changes = that_help(cause, training.described)
    if more_bytes and helps_in_one_piece(error, training):  # it costs nothing
        changes = [Change(IN_ONE_PIECE, training.described, frozenset()), *changes]
    fitting, untried, may_fit = _tried(card, training, cause, changes, more_bytes)
    if not fitting:
        several = "" if more_bytes else ": `study advise` tries several"
        return f"No single change that helps with it would fit{several}.{untried}", may_fit
    times = "" if more_bytes else " `study advise` predicts how long their steps take."
    is_marked = any(words.endswith("*") for words in fitting)
    legend = f" (* shrinks the {' or '.join(cause.part_of)})" if is_marked else ""
    return f"Each of these would fit, the mildest first{legend}: {'; '.join(fitting)}.{untried}{times}", may_fit


def _tried(
    card: Gpu, training: KnownTraining, cause: Cause, changes: list[Change], more_bytes: int
) -> tuple[list[str], str, tuple[Change, ...]]:
    """Return in words which changes are predicted to fit, and which could not be tried; and all of these."""
    fitting, may_fit = [], []
    untried = ""
    for change in changes:
        try:
            changed_bytes = more_bytes + predicted_memory(training.wanted, change.training).peak_bytes
        except Stop as stop:
            if stop.status == "unavailable":
                untried += f" Not tried: {change.words}: {stop.what}."  # its remedy is of flags that nobody gave
                may_fit.append(change)
            continue
        answer = fits_on(card, changed_bytes)
        if answer != "no":
            just = ", only just" if answer == "only just" else ""
            mark = "*" if change.shrinks_part(cause) else ""
            fitting.append(f"{change.words} ({binary_size(changed_bytes)}{just}){mark}")
            may_fit.append(change)
    return fitting, untried, tuple(may_fit)


def _assumed(training: KnownTraining, model: Transformer) -> str:
    rows = number_of(training.rows, f"sequences of {training.sequence or default_sequence(model):,} tokens")
    assumed = f"Predicted with {rows} per micro-batch"
    if training.described.checkpointing is None:
        return assumed
    return f"{assumed} and activations {'recomputed' if training.described.checkpointing else 'kept'}"


def _needs(training: KnownTraining, needs_bytes: float) -> str:
    """Return what a rank needs. Where nobody says whether activations are recomputed, both are told."""
    if training.unfitting:
        return training.unfitting
    needs = f"a rank needs {binary_size(needs_bytes)} at the peak"
    if training.described.checkpointing is not None:
        return needs
    recomputing = replace(training.described, checkpointing=True)
    other = binary_size(predicted_memory(training.wanted, recomputing).peak_bytes)
    return f"{needs} if activations are kept, and {other} if they are recomputed, which is not known"


def _later(error: OomError, training: KnownTraining, needs_bytes: int) -> str:
    """Return how much more a later step needs than the first update had, if that made moments; else nothing."""
    more_bytes = needs_bytes - (error.allocated or needs_bytes) - error.asked.low
    is_known = training.described.checkpointing is not None and not ranks_that_share(error, training)
    if more_bytes < ROUNDED or not is_known or not makes_moments(error):
        return ""
    return f" That is of later steps, which need {binary_size(more_bytes)} more than this first update had."


def _although_it_fits(error: OomError, training: KnownTraining, model: Transformer, rest: _Rest) -> str:
    """Return how a sentence goes on that says that a training fits: with what takes most of the rest."""
    if other := ranks_that_share(error, training):
        return f", but the size is that of states shared by {other}: did the launcher start {training.ranks}?"
    taken = binary_size(rest.taken_bytes)
    match rest.where:
        case "nowhere":
            return ": something that was not given takes the rest, or differs."
        case "unused":
            first = f" Try {IN_ONE_PIECE} first." if helps_in_one_piece(error, training) else ""
            return f", but {taken} are reserved by PyTorch and not used.{first}"
        case "outside":
            return f", but {taken} are outside PyTorch: {_outside(error)}."
    copy = _second_model(training, model, rest.taken_bytes)
    near = ", or ".join(_near(error, training, model, rest.taken_bytes))
    by = copy or "something that was not given takes them, or differs"
    by += f"; about as much is taken by {near}" if near else ""
    return f", but this process had {taken} more in tensors: {by}."


def _outside(error: OomError) -> str:
    named = f"{error.told_others}, and the rest is of " if error.others else "other processes, "
    return f"{named}NCCL, a CUDA context"


def _second_model(training: KnownTraining, model: Transformer, excess_bytes: int) -> str:
    """Return that a rank had as much more as a second, whole model takes, and what makes one. Empty: it had not."""
    for width in WIDTHS:
        if abs(model.parameters * width / excess_bytes - 1) <= SAME:
            copy = f"as much as a second, whole model, {model.parameters:,} parameters x {width} bytes"
            line = training.settings.get("second_model")
            maker = f"`{shorten(line, 80)}`" if line else "a reference, a pipeline or an average of weights"
            return f"{copy}, such as {maker}"
    return ""


def _near(error: OomError, training: KnownTraining, model: Transformer, excess_bytes: int) -> list[str]:
    """Return what would take about as many bytes as a rank had beside what is predicted, and no text rules out."""
    ruled_out = {*training.settings.get("ruled_out", ()), *([NOT_RECOMPUTED] if training.inferred else ())}
    takers = [each for each in _takers(training, model) if each[0] not in ruled_out]
    logits = training.rows * training.sequence * training.vocabulary
    if not any(error.asked.fits(width * logits) for width in WIDTHS):  # else the size says how long sequences were
        takers += _longer(training, model)
    near = {size: words for words, size in takers if abs(size / excess_bytes - 1) <= NEAR}
    return [near[size] for size in sorted(near, key=lambda size: abs(size - excess_bytes))[:MOST_NEAR]]


def _takers(training: KnownTraining, model: Transformer) -> Iterator[tuple[str, int]]:
    """Yield what often differs from what was given, with the bytes that it takes."""
    given, sequence = training.described, training.sequence or default_sequence(model)
    now = predicted_memory(training.wanted, given)
    if given.checkpointing:
        kept = predicted_memory(training.wanted, replace(given, checkpointing=False))
        yield NOT_RECOMPUTED, kept.peak_bytes - now.peak_bytes
    if training.arm.startswith("zero"):  # elsewhere they are predicted in fp32
        yield IN_FP32, now.at_peak.get("weights", 0)  # 4 bytes, and not 2
    dimensions = model.dimensions
    heads = dimensions.get("num_attention_heads") or 1
    width = dimensions.get("hidden_size", 0) / heads * dimensions.get("num_key_value_heads", heads)
    cached = 4 * training.rows * sequence * width * dimensions.get("num_hidden_layers", 0)  # two tensors of 2 bytes
    yield CACHE, round(cached)


def _longer(training: KnownTraining, model: Transformer) -> Iterator[tuple[str, int]]:
    """Yield longer sequences, with the bytes that they take more."""
    sequence = training.sequence or default_sequence(model)
    now_bytes = predicted_memory(training.wanted, training.described).peak_bytes
    for times in (2, 4):
        with contextlib.suppress(Stop):  # the model reads no more
            longer = predicted_memory(training.wanted, replace(training.described, sequence=times * sequence))
            yield f"a sequence of {times * sequence:,} tokens", longer.peak_bytes - now_bytes


def predicted_memory(wanted: Wanted, given: Described) -> Estimate:
    return prediction_of(wanted, given).memory


def prediction_of(wanted: Wanted, given: Described) -> Prediction:
    training = TrainingFlags(gpus=given.ranks, sequence=given.sequence)
    # One node, as nobody has said how large nodes are; no time is asked for.
    chunked = bool(given.chunked_loss)
    place = PlaceFlags(gpu="H100", gpus_per_node=training.ranks, machine=None, chunked_loss=chunked)
    shape = asked_for(wanted, given.sequence or 1)
    step = StepFlags(batch=training.ranks, checkpointing=bool(given.checkpointing))
    question = Question.of(shape, training, place, step)
    arm = settled_arm(arms.load_arm(given.arm or ""), question.gpus, question.local, given.buckets)
    return Prediction.of(question.training(arm, given.micro_batch or 1, given.accumulation or 1))


def that_help(cause: Cause, given: Described) -> list[Change]:
    """Return the single changes that help against a cause.

    Tokens share the GPU with all else: any change leaves them room. States may be made before any token is seen.
    """
    changes = [*single_changes(given)]
    if cause.id in BESIDE or not TOKENS.isdisjoint(cause.part_of):
        return changes
    return [change for change in changes if change.shrinks_part(cause)]


def single_changes(given: Described) -> Iterator[Change]:
    """Yield changes of one thing each, the mildest first.

    A loss in pieces, fewer sequences, recomputation, an arm that holds less.
    """
    yield from _loss_in_pieces(given)
    rows = given.micro_batch or 1
    while rows > 1:
        rows //= 2
        fold = (given.micro_batch or 1) // rows
        passes = "twice" if fold == 2 else f"{fold} times"
        fewer = replace(given, micro_batch=rows, accumulation=fold * (given.accumulation or 1))
        yield Change(f"--micro-batch {rows} and {passes} the accumulation", fewer, TOKENS)
    if not given.checkpointing:
        yield Change(RECOMPUTED, replace(given, checkpointing=True), frozenset(("activations",)))
    yield from _arms_that_hold_less(given)


def _loss_in_pieces(given: Described) -> Iterator[Change]:
    if not given.chunked_loss:
        yield Change(IN_PIECES, replace(given, chunked_loss=True), frozenset(("logits",)))


def _arms_that_hold_less(given: Described) -> Iterator[Change]:
    order = next((each for each in (HOLD_LESS_OF_FSDP, HOLD_LESS_OF_HSDP) if given.arm in each), HOLD_LESS)
    shrinks: frozenset[str] = frozenset()
    is_later = False
    for arm, divides in order.items():
        if is_later:
            shrinks |= divides
            yield Change(f"--arm {arm}", replace(given, arm=arm), shrinks)
        is_later = is_later or arm == given.arm
