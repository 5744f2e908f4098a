"""Are activations kept or recomputed? By the numbers of an error, where nobody says it."""

from dataclasses import replace

from study.configs.oom.causes import SIZE_FITS, Cause
from study.configs.oom.changes import predicted_memory
from study.configs.oom.reading import OomError
from study.configs.oom.training import KnownTraining
from study.core.errors import Stop
from study.core.text import binary_size

# Causes that say what stands beside, and not which tensor was asked for.
ASIDE = ("oom-states", "oom-other-process", "oom-fragmentation")
CLEARLY = 1.25  # times: most published peaks were within a tenth of the predicted one (MISS of predict/advise.py)


def with_recomputing(error: OomError, training: KnownTraining, causes: list[Cause]) -> KnownTraining:
    """Return a training with what the numbers of its error say of activations, if they say one thing clearly."""
    answer = recomputes(error, training, causes)
    if answer is None:
        return training
    how = "recomputed" if answer else "kept"
    inferred = f"activations {how}, as the log's {binary_size(error.allocated or 0, 4)} say"
    return replace(training, described=replace(training.described, checkpointing=answer), inferred=inferred)


def recomputes(error: OomError, training: KnownTraining, causes: list[Cause]) -> bool | None:
    """Return whether activations are recomputed. None: somebody has said it, or the numbers fit both or neither."""
    given = training.described
    if given.checkpointing is not None or error.where != "GPU" or not error.allocated:
        return None
    if training.model is None or training.missing or not given.sequence:
        return None
    try:
        kept = predicted_memory(training.wanted, replace(given, checkpointing=False))
        recomputed = predicted_memory(training.wanted, replace(given, checkpointing=True))
    except Stop:  # an arm whose memory is not predicted
        return None
    needed_bytes = error.allocated + error.asked.low
    if needed_bytes > CLEARLY * recomputed.peak_bytes:
        return False if needed_bytes <= CLEARLY * kept.peak_bytes else None
    weight_bytes = recomputed.at_peak.get("weights", 0)
    if not _asks_for_logits(causes) or error.allocated < weight_bytes / CLEARLY:
        return None
    # The logits come after all layers: what these keep is allocated then, beside the weights.
    of_layers_bytes = kept.peak_bytes - recomputed.peak_bytes
    return True if CLEARLY * error.allocated < weight_bytes + of_layers_bytes else None


def _asks_for_logits(causes: list[Cause]) -> bool:
    """Whether the tensor has the size of the logits, and the traceback names nothing else."""
    of_tensor = [cause for cause in causes if cause.id not in ASIDE]
    return bool(of_tensor) and of_tensor[0].id == "oom-logits" and SIZE_FITS in of_tensor[0].reasons
