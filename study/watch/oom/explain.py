"""Explain an error about memory: read it, match its size with a training, and rank the causes."""

from dataclasses import dataclass

from study.predict.front import estimate
from study.watch.oom import reading, sizes
from study.watch.oom.causes import Cause, Known, causes
from study.watch.oom.reading import OomError
from study.watch.oom.training import (
    Described,
    Shaped,
    Training,
    checked,
    dimensions,
    gpu_of,
    model_of,
    training,
    with_config,
    with_log,
)

SHARD_WEIGHTS = ("zero3", "fsdp", "hsdp")  # the beginnings of the names of such arms
STATES = ("weights", "gradients", "master", "moments")


@dataclass(frozen=True)
class Explanation:
    """An error with its causes. `training` is None if too little is known for a prediction, as is `gpu`."""

    error: OomError
    causes: list[Cause]
    training: Training | None
    gpu: str | None
    read: tuple[str, ...]
    """Flags for what the log says of the training."""


def explain(text: str, wanted: Shaped, given: Described) -> Explanation:
    """Return the causes of the first error in a text. Raise Stop if it has none, or if a flag is wrong."""
    error = reading.find(text)
    given, zero = with_config(checked(given))
    wanted, filled, read = with_log(wanted, given, reading.settings(text, error))
    model = model_of(wanted, given)
    run = training(model, filled, zero)
    known = dimensions(wanted, model, filled)
    size_matches = _size_matches(error, known, run)
    shards = (filled.arm or "").startswith(SHARD_WEIGHTS)
    states = _states_bytes(run, known, filled)
    facts = Known(vocabulary=known.vocabulary, shards_weights=shards, states_bytes=states)
    return Explanation(error, causes(error, size_matches, facts), run, gpu_of(filled.gpu, error.total), read)


def _size_matches(error: OomError, known: sizes.Dimensions, run: Training | None) -> list[sizes.Match]:
    """Return what has the size that was asked for."""
    if error.asked is None or error.where != "GPU":
        return []
    if not known.has_shape:
        return sizes.common(error.asked)
    return sizes.matches(error.asked, known, run.setup if run else None)


def _states_bytes(run: Training | None, known: sizes.Dimensions, given: Described) -> float | None:
    if run is None:
        return sizes.states_bytes(known, given.arm, given.ranks)
    at_peak = estimate(run.setup).at_peak
    return sum(at_peak.get(role, 0) for role in STATES)
