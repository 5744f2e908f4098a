"""What to try first, and what each cause advises, in accord with what is predicted and with what is known."""

import re
from dataclasses import replace
from typing import Any

from study.configs.oom.causes import HINT, SIZE_FITS, UNUSED_SHARE, Cause, in_evaluation, rows
from study.configs.oom.changes import BESIDE, IN_PIECES, RECOMPUTED, TOKENS, Change
from study.configs.oom.explain import IN_FP32, steps_ran
from study.configs.oom.fitting import WhatFits, named, predicted
from study.configs.oom.means import in_its_words
from study.configs.oom.reading import OomError
from study.configs.oom.said import IN_ONE_PIECE, is_fsdp
from study.configs.oom.training import KnownTraining
from study.configs.pasted.in_use import advised
from study.configs.pasted.read import Pasted
from study.core.text import binary_size
from study.known.stacks import fsdp_of_trainer

MOST_NAMED = 3  # changes
OF_DEEPSPEED = re.compile(r"\bdeepspeed/runtime/|\bdeepspeed\.initialize\(|--deepspeed\b|\bzero_optimization\b")
NOT_AT_WORK = (
    "find out why the loss in pieces was not at work in that run, which made whole logits: its kernel was not there or "
    "not applied to this model, or the log is older than what switches it on"
)
OF_A_PASS = ("oom-logits", "oom-padded", "oom-activations")  # in an evaluation recomputing does not help
ENOUGH = 0.5  # of what is unused, in pieces: so much of it may come together
# By what a text may have in use: the change that a remedy may name.
ADVISED = {"chunked_loss": IN_PIECES, "checkpointing": RECOMPUTED}


def first_tried_first(error: OomError, training: KnownTraining, causes: list[Cause]) -> list[Cause]:
    """Return causes with that of pieces, or of other processes, first, where a rank has room without them.

    To end these costs nothing, and is what to try before any change.
    """
    beside = {cause.id: cause for cause in causes if cause.id in BESIDE}
    if not beside:
        return causes
    which = predicted(error, training, named(causes))
    if which.is_in_pieces and "oom-fragmentation" in beside:
        first = beside["oom-fragmentation"]
        why = "steps ran" if steps_ran(error, training) else "the training is predicted to fit without such pieces"
    elif which.lacks_others and "oom-other-process" in beside:
        first, why = beside["oom-other-process"], "the training is predicted to fit without it"
    else:
        return causes
    first = replace(first, points=max(causes[0].points, first.points) + HINT, reasons=(*first.reasons, why))
    return [first, *(cause for cause in causes if cause.id != first.id)]


def with_remedies(
    error: OomError, training: KnownTraining, causes: list[Cause], which: WhatFits, pasted: Pasted
) -> list[Cause]:
    """Return causes with what each advises here: of the framework that is in use, and in accord with what fits."""
    told, of_tensor = with_known(pasted, training), named(causes)
    fitted = []
    for cause in causes:
        remedy = in_accord(cause, which.may_fit if cause is of_tensor else None, told)
        if _lacked_pieces(error, training, cause):
            remedy = NOT_AT_WORK
        if cause.id in OF_A_PASS and in_evaluation(error):
            remedy = in_its_words(rows()["oom-evaluation"]["remedy"], told.said)
        if cause is causes[0]:
            remedy = _in_one_piece_first(error, training, causes, which) + remedy
        fitted.append(replace(cause, remedy=remedy))
    return fitted


def _lacked_pieces(error: OomError, training: KnownTraining, cause: Cause) -> bool:
    """Whether whole logits were made though a script or a config has the loss in pieces. A flag is of a next run."""
    is_whole = SIZE_FITS in cause.reasons or bool(IN_FP32.search(error.traceback))
    return cause.id == "oom-logits" and is_whole and bool(training.settings.get("chunked_loss"))


def _in_one_piece_first(error: OomError, training: KnownTraining, causes: list[Cause], which: WhatFits) -> str:
    """Return how a remedy begins where pieces are not named first, and a small part of them would have been enough."""
    missing_bytes = error.asked.high - (error.free or 0)
    is_enough = 0 < missing_bytes <= ENOUGH * error.unallocated
    # Where much is unused, the setting comes first, whatever is predicted to fit.
    is_much = error.unallocated >= UNUSED_SHARE * (error.total or 0)
    is_hopeless = (which.is_too_large and not is_much) or causes[0].id in (
        "oom-fragmentation",
        "oom-states",
        "oom-other-process",
    )
    if error.where != "GPU" or not is_enough or is_hopeless or IN_ONE_PIECE in training.settings:
        return ""
    missing, unused = binary_size(missing_bytes), binary_size(error.unallocated)
    return f"first set {IN_ONE_PIECE}, which costs nothing: {missing} were missing, and {unused} are unused; then "


def with_known(pasted: Pasted, training: KnownTraining) -> Pasted:
    """Return a text that says what else is known of its training, as far as remedies depend on it."""
    arm, version = training.arm, str(training.settings.get("fsdp_version", ""))
    known: dict[str, Any] = {"checkpointing": training.at_work.get("checkpointing") or training.described.checkpointing}
    known |= {"optimizer": training.described.optimizer, "quantized": training.described.quantized}
    if "_cpu" in arm or "_nvme" in arm:
        known["offload"] = "cpu"
    elif arm:
        known["offload"] = "none"
    if arm.startswith("zero"):
        known["stage"] = int(arm[len("zero")])
    elif is_fsdp(arm):
        known["sharding"] = "shard_grad_op" if arm == "fsdp2_grad_op" else "full_shard"
        if pasted.said.get("stage") not in ("FSDP1", "FSDP2"):
            known["stage"] = "FSDP1" if version.startswith("1") else "FSDP2"
            if pasted.said.get("stage") == "FSDP" or "the Trainer's fsdp" in training.settings:
                own = training.settings.get("the Trainer's fsdp_version", pasted.said.get("fsdp_own"))
                by_release = fsdp_of_trainer(pasted.releases.get("transformers"), own, version)
                known["stage"] = f"FSDP{own}" if own and by_release == "FSDP" else by_release
    elif arm:
        known["stage"] = "DDP"
    elif "stage" not in pasted.said and OF_DEEPSPEED.search(pasted.text):
        known["stage"] = "DeepSpeed"
    return replace(pasted, said=pasted.said | known)


def in_accord(cause: Cause, may_fit: tuple[Change, ...] | None, pasted: Pasted) -> str:
    """Return the remedy of a cause, without changes that were tried and do not fit."""
    remedy = in_its_words(cause.remedy, pasted.said)
    if TOKENS.isdisjoint(cause.part_of) or may_fit is None:
        return advised(remedy, pasted)
    if not may_fit:
        return "change several things at once: no single change would fit"
    if not any(change.shrinks_part(cause) for change in may_fit):
        changes = [change.words for change in may_fit[:MOST_NAMED]]
        return f"take {', or '.join(changes)}: no change of this part alone would fit"
    words = {change.words for change in may_fit}
    too_little = {name: True for name, change in ADVISED.items() if change not in words}
    return advised(remedy, replace(pasted, said=pasted.said | too_little))
