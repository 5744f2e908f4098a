"""What to try first, and what each cause advises, in accord with what is predicted and with what is known."""

from dataclasses import replace
from typing import Any

from study.configs.oom.causes import HINT, Cause
from study.configs.oom.changes import (
    IN_PIECES,
    RECOMPUTED,
    TOKENS,
    Change,
)
from study.configs.oom.excess import helps_in_one_piece
from study.configs.oom.fitting import named, predicted
from study.configs.oom.reading import OomError
from study.configs.oom.training import KnownTraining
from study.configs.pasted.in_use import advised
from study.configs.pasted.read import Pasted
from study.predict.front import papers

# By what a text may have in use: the change that a remedy may name.
ADVISED = {"chunked_loss": IN_PIECES, "checkpointing": RECOMPUTED}


def first_tried_first(error: OomError, training: KnownTraining, causes: list[Cause]) -> list[Cause]:
    """Return causes with that of pieces first, where a rank is predicted to have room without them.

    Its setting costs nothing, and is what to try before any change.
    """
    pieces = [cause for cause in causes if cause.id == "oom-fragmentation"]
    if not pieces or not helps_in_one_piece(error, training):
        return causes
    if not predicted(error, training, named(causes)).is_in_pieces:
        return causes
    reasons = (*pieces[0].reasons, "the training is predicted to fit without such pieces")
    first = replace(pieces[0], points=max(causes[0].points, pieces[0].points) + HINT, reasons=reasons)
    return [first, *(cause for cause in causes if cause.id != first.id)]


def with_known(pasted: Pasted, training: KnownTraining) -> Pasted:
    """Return a text that says what else is known of its training, as far as remedies depend on it."""
    arm, _, home = training.arm.partition("_")
    known: dict[str, Any] = {"checkpointing": training.described.checkpointing}
    if arm in papers.STAGES:
        known |= {"stage": papers.STAGES[arm], "offload": home or "none"}
    return replace(pasted, said=pasted.said | known)


def in_accord(remedy: str, cause: Cause, may_fit: tuple[Change, ...] | None, pasted: Pasted) -> str:
    """Return the remedy of the cause that is named, without changes that were tried and do not fit."""
    if TOKENS.isdisjoint(cause.part_of) or may_fit is None:
        return advised(remedy, pasted)
    if not may_fit:
        return "change several things at once: no single change would fit"
    if not any(change.shrinks_part(cause) for change in may_fit):
        return "one of the changes below: no change of this part alone would fit"
    words = {change.words for change in may_fit}
    too_little = {name: True for name, change in ADVISED.items() if change not in words}
    return advised(remedy, replace(pasted, said=pasted.said | too_little))
