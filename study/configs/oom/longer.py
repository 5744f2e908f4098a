"""Tensors of more tokens than were given, or than anybody said.

The size of the error says how long sequences were, or how many a micro-batch had.
"""

from dataclasses import replace

from study.configs.oom.causes import SIZE_FITS, Cause, hinted_causes
from study.configs.oom.explain import tokens_of_logits, widths
from study.configs.oom.reading import OomError
from study.configs.oom.training import Described, KnownTraining
from study.core.errors import Stop
from study.core.text import binary_size

LEAST = 1024  # tokens of a sequence: of shorter ones almost any size is some number


def with_longer_sequences(
    error: OomError, training: KnownTraining, causes: list[Cause], flags: Described
) -> tuple[list[Cause], KnownTraining]:
    """Return causes and a training with the tokens that the size is of, where the text names the logits.

    Both stay as they are if the tokens are those that were given, or make no whole sequences.
    """
    longer = _length(error, training)
    of_logits = [cause for cause in causes if cause.id == "oom-logits"]
    if longer is None or not of_logits:
        return causes, training
    tokens = training.rows * longer
    given = f"; {_said_by('sequence', flags, training)} {training.sequence:,}" if training.sequence else ""
    element_bytes = max(widths("oom-logits", error, training))
    size = f"{error.asked.text} = {tokens:,} tokens x {training.vocabulary:,} x {element_bytes} bytes"
    what = f"the logits of a micro-batch of {training.rows} x {longer:,} tokens{given}: {size}"
    reasons = (*of_logits[0].reasons, SIZE_FITS, *_sum_of_the_message(error, training))
    named = replace(of_logits[0], what=what, reasons=reasons)
    # The row of padded batches says the same of this size.
    changed = [named if cause.id == "oom-logits" else cause for cause in causes if cause.id != "oom-padded"]
    return changed, _by_size(training, sequence=longer)


def with_more_sequences(
    error: OomError, training: KnownTraining, causes: list[Cause], flags: Described
) -> tuple[list[Cause], KnownTraining]:
    """Return causes and a training with as many sequences as make the asked size, if the error is in an MLP.

    Both stay as they are if the sequences that were given make it, or no whole number of sequences does.
    """
    width, element_bytes = training.intermediate, 4 if training.products == "fp32" else 2
    token_bytes = width * element_bytes
    given = training.rows * training.sequence
    if not given or not token_bytes or training.sequence < LEAST:
        return causes, training
    of_layers = [cause for cause in causes if cause.id == "oom-activations"]
    if not of_layers or SIZE_FITS in of_layers[0].reasons or "oom-activations" not in hinted_causes(error):
        return causes, training
    rows = round(error.asked.middle / token_bytes / training.sequence)
    tokens = rows * training.sequence
    if rows <= training.rows or not error.asked.fits(tokens * token_bytes):
        return causes, training
    length = f"{training.sequence:,} tokens; {_said_by('micro_batch', flags, training)} {training.rows}"
    size = f"{error.asked.text} = {tokens:,} tokens, not {given:,}, x {width:,} x {element_bytes} bytes"
    what = f"activations of a micro-batch of {rows} x {length}: {size}"
    named = replace(of_layers[0], what=what, reasons=(*of_layers[0].reasons, SIZE_FITS))
    changed = [named if cause.id == "oom-activations" else cause for cause in causes]
    conflicts = tuple(each for each in training.conflicts if each.name != "micro_batch")  # neither of them counts
    return changed, _by_size(replace(training, conflicts=conflicts), micro_batch=rows)


def _by_size(training: KnownTraining, **said: int) -> KnownTraining:
    described = replace(training.described, **said)  # type: ignore[arg-type]
    return replace(training, described=described, from_text=training.from_text - said.keys(), by_size=frozenset(said))


def _said_by(name: str, flags: Described, training: KnownTraining) -> str:
    """Return who says how long sequences are, or how many."""
    if getattr(flags, name) is not None:
        return "you said"
    return "the text says" if name in training.from_text else "the config says"


def _length(error: OomError, training: KnownTraining) -> int | None:
    """Return how long sequences are whose logits have the asked size. None: they are no whole ones, or as was given."""
    tokens = tokens_of_logits(error, training)
    if tokens is None or tokens < training.rows * training.sequence or tokens % training.rows:
        return None
    longer = tokens // training.rows
    most = training.model.positions if training.model else None
    return None if most and longer > most else longer  # then several are packed into one


def _sum_of_the_message(error: OomError, training: KnownTraining) -> list[str]:
    """Return that a rank had more than is predicted with what was given; nothing if that cannot be predicted."""
    if not error.allocated or not training.sequence or training.model is None or training.missing:
        return []
    if training.described.chunked_loss:  # which the run that ended had not
        return []
    try:  # whether activations are recomputed may be unknown: kept, they take more
        needs_bytes = training.memory(checkpointing=bool(training.described.checkpointing)).peak_bytes
    except Stop:
        return []
    if error.needed <= needs_bytes:
        return []
    return [f"{error.sum_of_tensors}, and {binary_size(needs_bytes)} are predicted with {training.sequence:,}"]
