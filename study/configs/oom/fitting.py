"""Whether a training is predicted to fit the GPU of which the error tells the size, and which single change would."""

import contextlib
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Literal

from study.configs.oom.causes import (
    BETWEEN_STEPS,
    FIRST,
    UNUSED_SHARE,
    Cause,
    hinted_causes,
    in_a_step,
    in_evaluation,
    makes_moments,
    others_hold_a_part,
    rows,
)
from study.configs.oom.changes import BESIDE, TOKENS, Change, several_changes, that_help
from study.configs.oom.excess import Excess, although_it_fits, as_a_second_model, helps_in_one_piece
from study.configs.oom.explain import FILLING, ranks_that_share, steps_ran
from study.configs.oom.reading import OomError
from study.configs.oom.said import IN_ONE_PIECE, typed
from study.configs.oom.training import Described, KnownTraining, prediction_of, reference_bytes
from study.core.errors import Stop
from study.core.gpus import GPUS, Gpu, gpu_named, like
from study.core.text import binary_size, number_of, one_by_one, size
from study.predict.front import (
    ANY_GPU,
    HOST_PROCESS_BYTES,
    PUBLISHED_BYTES,
    Prediction,
    Transformer,
    default_sequence,
    fits_on,
    loading_bytes,
    node_size,
    reserve_bytes,
)

PASSING = ("oom-gather", "oom-buckets", "oom-embeddings")  # causes that fill memory for a moment of a pass
ROUNDED = 2**27  # bytes: less is within a digit of what is printed
FAR = 1.2  # times the GPU
OF_HOST = ("oom-host", "oom-pinned")
WHOLE_BYTES = 4  # of a weight in fp32
MISSED = 0.1  # of a peak: most published ones were within a tenth of the predicted one (MISS of predict/advise.py)
# When a tensor is made, by the cause that a traceback names: in a pass, which the predictor calls "backward", or later.
MADE_IN = {
    "oom-logits": "backward",
    "oom-attention": "backward",
    "oom-activations": "backward",
    "oom-optimizer": "update",
}
FITS = {"yes": "That fits", "only just": "That only just fits", "no": "That does not fit"}
JUST = f"Only just: less than {MISSED:.0%} of the peak would be left, or nvidia-smi would show the GPU as full; "
RAN = "That does not fit, but steps ran here: they needed less, or this batch is larger."
UNKNOWN = "No change can be said to fit before that is known."


@dataclass(frozen=True)
class WhatFits:
    """What is predicted of a training, in words. Empty: too little is said."""

    words: str = ""
    may_fit: tuple[Change, ...] | None = None  # changes that fit, or could not be tried. None: none was looked at
    is_in_pieces: bool = False  # it fits, and with all in one piece the tensor would have had room
    lacks_others: bool = False  # it fits, and with what is outside PyTorch the tensor would have had room
    is_too_large: bool = False  # it is predicted not to fit, whatever is in pieces
    differs: str = ""  # that the log has more or less in use than what was given makes


def named(causes: list[Cause]) -> Cause:
    """Return the cause that a change has to shrink: the first that is of a tensor."""
    return next((cause for cause in causes if cause.id not in BESIDE), causes[0])


def predicted(error: OomError, training: KnownTraining, cause: Cause) -> WhatFits:
    """Return what a rank is predicted to need of this GPU, and which changes would fit."""
    model, given = training.model, training.described
    error = error.beside_engine
    total_bytes = error.total or training.gpu_bytes
    if error.where in OF_HOST and model and {*training.missing} <= {"micro_batch"}:
        return WhatFits(_of_host(training, model))
    if error.where != "GPU" or not total_bytes or model is None or training.missing:
        return WhatFits()
    try:
        prediction = prediction_of(training.wanted, given)
        kept = kept_bytes(training, given)
        needs_bytes = prediction.memory.peak_bytes + kept
    except Stop as stop:  # an arm whose memory is not predicted, or what is traced where PyTorch is missing
        return WhatFits(f"Not predicted: {stop.sentence}")
    card = like(GPUS[gpu_named("H100")], total_bytes, None)  # memory depends on no more than its size
    between = "oom-evaluation" if in_evaluation(error) else cause.id
    if between in BETWEEN_STEPS and (fitting := _steps_that_fit(card, training, model)):
        return WhatFits(f"{fitting}; the rest is {BETWEEN_STEPS[between]}.")
    gpu = f"{binary_size(total_bytes, 4)} ({size(total_bytes)})"  # with the digits of the message
    beside = f" beside an engine's {binary_size(error.engine, 4)}" if error.engine else ""
    has = f"this GPU has {gpu}{beside}, less {binary_size(reserve_bytes(card))} for context and fragmentation"
    later = _later(error, training, needs_bytes)
    needs = f"{_assumed(training, model)}: {_needs(training, needs_bytes)}; {has}.{later}"
    fit = _fits(card, prediction, kept)
    made_in = next((MADE_IN[cause] for cause in hinted_causes(error) if cause in MADE_IN), "")
    excess = Excess.of(error, prediction.most_bytes(made_in) + kept)
    is_of_next_run = given.chunked_loss and "logits" in cause.part_of  # which would not fail so
    is_beside = excess.where == "tensors" and in_a_step(error)
    is_as_given = not (is_beside or ranks_that_share(error, training))
    is_in_pieces = helps_in_one_piece(error, training)
    if fit == "no" and (is_as_given or is_of_next_run):
        which, may_fit = _which_fit(card, training, error, cause)
        if steps_ran(error, training):
            which = f"{RAN} {which if may_fit else UNKNOWN}"
            return WhatFits(f"{needs} {which}", may_fit or None, is_in_pieces)
        differs = _less(error, training, card, needs_bytes) if in_a_step(error) and not later else ""
        return WhatFits(f"{needs} {which}", may_fit, is_too_large=True, differs=differs)
    if is_of_next_run:
        return WhatFits(f"{needs} That fits: a loss in pieces never makes the whole logits, of which the message is.")
    just = f" ({binary_size(needs_bytes)} of {_most(card)})" if fit == "only just" else ""
    words = f"{needs} {FITS[fit]}{just}{although_it_fits(error, training, model, excess)}"
    if is_beside and not ranks_that_share(error, training):
        return _with_excess(error, training, cause, card, excess, words)
    if fit == "yes" or excess.where == "outside" or not is_as_given:
        is_in_pieces &= excess.where == "unused" and is_as_given
        lacks_others = excess.where == "outside" and is_as_given and others_hold_a_part(error, total_bytes)
        return WhatFits(words, is_in_pieces=is_in_pieces, lacks_others=lacks_others)
    which, may_fit = _which_fit(card, training, error, cause)
    return WhatFits(f"{words} If it fails again, {which[0].lower()}{which[1:]}", may_fit, is_in_pieces)


def _of_host(training: KnownTraining, model: Transformer) -> str:
    """Return what a node's host needs: for what is offloaded, and while the ranks load the model; and which decides."""
    try:
        on_host = prediction_of(training.wanted, training.described).memory.on_host
    except Stop as stop:
        return f"Not predicted: {stop.sentence}"
    ranks = node_size(training.ranks, GPUS[gpu_named(ANY_GPU)], None)
    parts = {role: ranks * held for role, held in on_host.items() if held}
    states_bytes = sum(parts.values()) + ranks * HOST_PROCESS_BYTES
    whole_bytes = loading_bytes(model, ranks, WHOLE_BYTES)
    named_parts = ", ".join(f"{role} {binary_size(held)}" for role, held in parts.items())
    states = f"{binary_size(states_bytes)} from the start of training on ({named_parts or 'nothing is offloaded'}"
    decides = "Loading decides" if not parts else "The offloaded states decide"
    if parts and states_bytes < whole_bytes:
        decides += ", unless each rank loads so"
    return (
        f"Predicted for the host of a node with {number_of(ranks, 'ranks')}: {states}, and "
        f"{binary_size(HOST_PROCESS_BYTES)} for each process). While it loads, "
        f"{binary_size(loading_bytes(model, ranks, PUBLISHED_BYTES))}, and {binary_size(whole_bytes)} if each rank "
        f"makes the whole model in fp32. {decides}."
    )


def _with_excess(
    error: OomError, training: KnownTraining, cause: Cause, card: Gpu, excess: Excess, words: str
) -> WhatFits:
    """Return what is said where a rank had more than what was given makes: if much more, no change is said to fit.

    What is as much as a second model is known, and stays with any change. So does what a prediction may miss.
    """
    given = training.described
    peak_bytes = prediction_of(training.wanted, given).memory.peak_bytes + kept_bytes(training, given)
    is_much = error.unallocated >= UNUSED_SHARE * card.memory_bytes  # beside them less explains nothing
    is_whole = fits_on(card, peak_bytes + excess.taken_bytes) != "no"  # if nothing were in pieces
    is_in_pieces = is_much and is_whole and helps_in_one_piece(error, training)
    is_too_large = fits_on(card, peak_bytes) == "no" and not steps_ran(error, training)
    is_missed = excess.taken_bytes <= MISSED * peak_bytes
    if not (is_missed or as_a_second_model(training, excess.taken_bytes)):
        if is_whole and helps_in_one_piece(error, training):
            words += f" {IN_ONE_PIECE} leaves room for them ({binary_size(peak_bytes + excess.taken_bytes)})."
        differs = excess.differs(error)
        return WhatFits(f"{words} {UNKNOWN}", None, is_in_pieces, is_too_large=is_too_large, differs=differs)
    which, may_fit = _which_fit(card, training, error, cause, excess.taken_bytes)
    return WhatFits(
        f"{words} With that on top {which[0].lower()}{which[1:]}", may_fit, is_in_pieces, is_too_large=is_too_large
    )


def with_activations_first(error: OomError, training: KnownTraining, causes: list[Cause]) -> list[Cause]:
    """Return causes with the activations first, if they fill the GPU where a passing tensor was asked for last."""
    total_bytes = error.total or training.gpu_bytes
    is_said = total_bytes and training.model and not training.missing and training.described.checkpointing is not None
    if not is_said or named(causes).id not in PASSING or in_evaluation(error):
        return causes
    with contextlib.suppress(Stop):
        memory = training.memory()
        taken_bytes = memory.at_peak.get("activations", 0)
        card = like(GPUS[gpu_named("H100")], total_bytes, None)
        if taken_bytes > FILLING * total_bytes and fits_on(card, memory.peak_bytes) == "no":
            row = rows()["oom-activations"]
            reasons = (f"they are predicted to take {binary_size(taken_bytes)} of {binary_size(total_bytes, 4)}",)
            first = Cause("oom-activations", row["sentence"], FIRST, reasons, row["remedy"], row["apart"])
            return [first, *(cause for cause in causes if cause.id != first.id)]
    return causes


def far_beyond(error: OomError, training: KnownTraining) -> str:
    """Return that a training needs far more than its GPU has: which tensor came last says little then. Empty: not so.

    Where nobody says whether activations are recomputed, they are.
    """
    total_bytes = error.total or training.gpu_bytes
    is_said = error.where == "GPU" and total_bytes and training.model and not training.missing
    if not is_said or training.unfitting or steps_ran(error, training):
        return ""
    with contextlib.suppress(Stop):
        needs_bytes = training.memory(checkpointing=training.described.checkpointing is not False).peak_bytes
        if needs_bytes > FAR * total_bytes:
            needs, gpu = binary_size(needs_bytes), binary_size(total_bytes, 4)
            return f"The training as given needs {needs}, predicted, on a GPU of {gpu}."
    return ""


def _steps_that_fit(card: Gpu, training: KnownTraining, model: Transformer) -> str:
    """Return that the steps of a training fit, with activations kept if nobody says it. Empty: they do not."""
    said = training.described.checkpointing
    room_bytes = card.memory_bytes - reserve_bytes(card)
    for checkpointing in (False, True) if said is None else (said,):
        needs_bytes = training.memory(checkpointing=checkpointing).peak_bytes
        if fits_on(card, needs_bytes) != "no":
            needs = f"{needs_bytes / 2**30:.1f} of {room_bytes / 2**30:.1f} GiB"
            described = replace(training.described, checkpointing=checkpointing)
            return f"{_assumed(replace(training, described=described), model)}: the training fits ({needs})"
    return ""


def _which_fit(
    card: Gpu, training: KnownTraining, error: OomError, cause: Cause, more_bytes: int = 0
) -> tuple[str, tuple[Change, ...] | None]:
    """Return which changes would fit, in words that mark those that shrink what is named, and which may.

    `more_bytes` are on the GPU beside what is predicted. `study advise` knows nothing of them.
    """
    if refuted := next((each for each in training.conflicts if each.by_numbers), None):
        return f"The log shows something else: {typed(refuted.name, refuted.at_work)} predicts that. {UNKNOWN}", None
    changes = that_help(cause, training.described, training.model)
    if in_evaluation(error):  # whose batch and loss are its own, and which recomputes nothing
        changes = [change for change in changes if not change.shrinks <= TOKENS]
    if more_bytes and helps_in_one_piece(error, training):  # it costs nothing
        changes = [Change(IN_ONE_PIECE, training.described, frozenset()), *changes]
    fitting, untried, may_fit = _tried(card, training, cause, changes, more_bytes)
    if not fitting:
        several = "" if more_bytes else ": `study advise` tries several"
        is_open = training.described.checkpointing is None  # recomputed ones may leave room
        kept = " if activations are kept" if is_open else ""
        together, *_ = _tried(card, training, cause, [*several_changes(training.described)], more_bytes)
        if together:
            several = f", but these together would: {together[0].removesuffix('*')}"
        words = f"No single change that helps with it would fit{kept}{several}.{untried}"
        return words, None if is_open and not may_fit else may_fit
    times = "" if more_bytes else " `study advise` predicts how long their steps take."
    is_marked = any(words.endswith("*") for words in fitting)
    legend = f" (* shrinks the {' or '.join(cause.part_of)})" if is_marked else ""
    why = f" {JUST}{_most(card)} may be taken." if any("only just)" in words for words in fitting) else ""
    each = "Each"
    if others_hold_a_part(error, card.memory_bytes):
        each = f"Without the {binary_size(error.outside)} outside PyTorch, each"
    return f"{each} of these would fit, the mildest first{legend}: {'; '.join(fitting)}.{why}{untried}{times}", may_fit


def _most(card: Gpu) -> str:
    return f"at most {binary_size(card.memory_bytes - reserve_bytes(card))}"


def _tried(
    card: Gpu, training: KnownTraining, cause: Cause, changes: list[Change], more_bytes: int
) -> tuple[list[str], str, tuple[Change, ...]]:
    """Return in words which changes are predicted to fit, and which could not be tried; and all of these."""
    fitting, may_fit = [], []
    untried = ""
    for change in one_by_one(changes, "change"):
        makes = vars(change.training).items() - vars(training.described).items()
        if not makes.isdisjoint(training.at_work.items()):
            continue
        try:
            changed = prediction_of(training.wanted, change.training)
            beside_bytes = more_bytes + kept_bytes(training, change.training)
            changed_bytes = beside_bytes + changed.memory.peak_bytes
        except Stop as stop:
            if stop.status == "unavailable":
                untried += f" Not tried: {change.words}: {stop.what}."  # its remedy is of flags that nobody gave
                may_fit.append(change)
            continue
        answer = _fits(card, changed, beside_bytes)
        if answer != "no":
            just = ", only just" if answer == "only just" else ""
            mark = "*" if change.shrinks_part(cause) else ""
            fitting.append(f"{change.words} ({binary_size(changed_bytes)}{just}){mark}")
            may_fit.append(change)
    return fitting, untried, tuple(may_fit)


def _fits(card: Gpu, prediction: Prediction, more_bytes: int = 0) -> Literal["yes", "only just", "no"]:
    """Say if a training fits, as `study estimate` does, beside as much more."""
    needs_bytes = prediction.memory.peak_bytes + more_bytes
    if (answer := fits_on(card, needs_bytes)) != "yes":
        return answer
    return fits_on(card, needs_bytes, prediction.kinds(card).driver + more_bytes)


def _assumed(training: KnownTraining, model: Transformer) -> str:
    rows = model.rows_in_words(training.rows, training.sequence or default_sequence(model))
    assumed = f"Predicted with {rows} per micro-batch"
    if training.described.checkpointing is None:
        return assumed
    return f"{assumed} and activations {'recomputed' if training.described.checkpointing else 'kept'}"


def _needs(training: KnownTraining, needs_bytes: float) -> str:
    """Return what a rank needs. Where nobody says whether activations are recomputed, both are told."""
    if training.unfitting:
        return training.unfitting
    needs = f"a rank needs {binary_size(needs_bytes)} at the peak"
    reference = reference_bytes(training.wanted, training.described)
    if kept := kept_bytes(training, training.described) - reference:
        line = shorten(training.settings["output"], 80)
        needs += f" ({binary_size(kept)} of it the logits that `{line}` keeps)"
    if reference:
        needs += f" ({binary_size(reference)} of it the reference model, which is frozen)"
    if training.described.checkpointing is not None:
        return needs
    other = binary_size(training.memory(checkpointing=True).peak_bytes + kept)
    if other == binary_size(needs_bytes):
        return f"{needs}, whether activations are kept or recomputed"
    return f"{needs} if activations are kept, and {other} if they are recomputed, which is not known"


def _later(error: OomError, training: KnownTraining, needs_bytes: int) -> str:
    """Return how much more a later step needs than the first update had, if that made moments; else nothing."""
    more_bytes = needs_bytes - (error.allocated or needs_bytes) - error.asked.low
    is_known = training.described.checkpointing is not None and not ranks_that_share(error, training)
    if more_bytes < ROUNDED or not is_known or not makes_moments(error):
        return ""
    return f" That is of later steps, which need {binary_size(more_bytes)} more than this first update had."


def _less(error: OomError, training: KnownTraining, card: Gpu, needs_bytes: int) -> str:
    """Return that a log has clearly less in use than what was given makes, and too little to fill the GPU."""
    if training.described.checkpointing is None:
        needs_bytes = min(needs_bytes, training.memory(checkpointing=True).peak_bytes)
    if not error.allocated or (1 + MISSED) * error.needed > needs_bytes or fits_on(card, error.needed) != "yes":
        return ""
    return (
        f"{error.had}; what was given makes {binary_size(needs_bytes)} at its peak, predicted. It failed before that, "
        "or micro-batch, sequence, recomputing or arm differ."
    )


def kept_bytes(training: KnownTraining, given: Described) -> int:
    """Return what a rank holds beside all that a prediction has: a reference model, and logits.

    A script's loop may hold these until it makes the next ones.
    """
    reference = reference_bytes(training.wanted, given)
    if "output" not in training.settings or given.chunked_loss:
        return reference
    width = 4 if training.products == "fp32" else 2
    return reference + width * (given.micro_batch or 0) * training.sequence * training.vocabulary
