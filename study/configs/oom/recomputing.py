"""Are activations kept or recomputed? By the numbers of an error, where nobody says it."""

from dataclasses import dataclass, replace

from study.configs.oom.causes import Cause, in_a_layers_forward, in_a_pass
from study.configs.oom.changes import BESIDE
from study.configs.oom.reading import OomError
from study.configs.oom.said import Conflict, typed
from study.configs.oom.training import KnownTraining
from study.core.errors import Stop
from study.core.text import binary_size
from study.predict.front import Estimate

# Causes that say what stands beside, and not which tensor was asked for.
ASIDE = ("oom-states", *BESIDE)
CLEARLY = 1.25  # times: most published peaks were within a tenth of the predicted one (MISS of predict/advise.py)


@dataclass(frozen=True)
class Expected:
    """What a rank is predicted to have allocated at the moment of an error: at least, and at most with what it asks."""

    least_bytes: float
    peak_bytes: float

    def fits(self, error: OomError) -> bool:
        is_enough = CLEARLY * (error.allocated or 0) >= self.least_bytes
        return is_enough and error.needed <= CLEARLY * self.peak_bytes


def with_recomputing(error: OomError, training: KnownTraining, causes: list[Cause]) -> KnownTraining:
    """Return a training with what the numbers of its error say of activations, if they say one thing clearly.

    What was given counts, and that they say otherwise is told.
    """
    error = error.beside_engine
    given = training.described
    is_said_enough = training.model is not None and not training.missing and given.sequence
    if not is_said_enough or error.where != "GPU" or not error.allocated or not in_a_pass(error):
        return training
    try:
        kept, recomputed = training.memory(checkpointing=False), training.memory(checkpointing=True)
    except Stop:  # an arm whose memory is not predicted
        return training
    decided = _decided(error, training, kept, recomputed, _is_of_logits(causes))
    if given.checkpointing is None:
        return decided
    if not decided.inferred or decided.described.checkpointing == given.checkpointing:
        return training
    counts = typed("checkpointing", given.checkpointing)
    sentence = f"{counts} counts. If all else is as it was given, it is false: {decided.inferred}."
    conflict = Conflict("checkpointing", decided.described.checkpointing, sentence, by_numbers=True)
    return replace(training, conflicts=(*training.conflicts, conflict))


def _decided(
    error: OomError, training: KnownTraining, kept: Estimate, recomputed: Estimate, is_of_logits: bool
) -> KnownTraining:
    allocated = binary_size(error.allocated or 0, 4)
    fits_kept = _kept(error, kept, recomputed, is_of_logits).fits(error)
    first_bytes = min(_first_states(recomputed), error.total or recomputed.peak_bytes)
    fits_recomputed = Expected(first_bytes, recomputed.peak_bytes).fits(error)
    if fits_kept and in_a_layers_forward(error) and recomputed.peak_when == "backward":  # the logits come later
        of_layers_bytes = recomputed.peak_bytes - recomputed.at_peak.get("temporaries", 0)
        fits_recomputed &= Expected(0, of_layers_bytes).fits(error)
    if not fits_kept and not fits_recomputed:
        kept_peak, recomputed_peak = binary_size(kept.peak_bytes), binary_size(recomputed.peak_bytes)
        needs = (
            f"a rank needs {kept_peak} at the peak with activations kept, and {recomputed_peak} with recomputed ones"
        )
        return replace(training, unfitting=f"{needs}; the log's {allocated} are of neither")
    # Before the loss a rank that keeps activations has as little as one that recomputes.
    if fits_kept == fits_recomputed or (fits_recomputed and not is_of_logits):
        return training
    how = "recomputed" if fits_recomputed else "kept"
    described = replace(training.described, checkpointing=fits_recomputed)
    return replace(training, described=described, inferred=f"activations {how} (as the log's {allocated} say)")


def _kept(error: OomError, kept: Estimate, recomputed: Estimate, is_of_logits: bool) -> Expected:
    if not is_of_logits:  # the pass may be anywhere, but memory ends where the GPU or the need does
        return Expected(min(kept.peak_bytes, error.total or kept.peak_bytes), kept.peak_bytes)
    # The logits come after all layers: what these keep is allocated then, beside the states.
    of_layers_bytes = kept.peak_bytes - recomputed.peak_bytes
    return Expected(_first_states(kept) + of_layers_bytes, kept.peak_bytes)


def _first_states(memory: Estimate) -> int:
    """Return what a rank holds before the first update makes the moments."""
    return memory.at_peak.get("weights", 0) + memory.at_peak.get("master", 0)


def _is_of_logits(causes: list[Cause]) -> bool:
    """Whether the tensor has the size of the logits, or the traceback names them, and nothing else comes first."""
    of_tensor = [cause for cause in causes if cause.id not in ASIDE]
    return bool(of_tensor) and of_tensor[0].id == "oom-logits"
