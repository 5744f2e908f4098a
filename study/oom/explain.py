"""Explain an error about memory: read it, match its size with a training, and rank the causes."""

from dataclasses import dataclass

from study.io.numbers import size
from study.oom import reading, sizes
from study.oom.causes import Cause, causes
from study.oom.reading import OomError
from study.oom.training import Described, Training, checked, dimensions, gpu_of, model_of, training, with_config
from study.predictor.estimate import estimate
from study.predictor.wanted import Wanted

SHARD_WEIGHTS = ("zero3", "fsdp", "hsdp")  # the beginnings of the names of such arms


@dataclass(frozen=True)
class Explanation:
    """An error with its causes. `training` is None if too little is known for a prediction, as is `gpu`."""

    error: OomError
    causes: list[Cause]
    training: Training | None
    gpu: str | None


def explain(text: str, wanted: Wanted, given: Described) -> Explanation:
    """Return the causes of the first error in a text. Raise Stop if it has none, or if a flag is wrong."""
    error = reading.find(text)
    given, zero = with_config(checked(given))
    model = model_of(wanted, given)
    run = training(model, given, zero)
    known = dimensions(wanted, model, given)
    found: list[sizes.Match] = []
    if error.asked and error.where == "GPU":
        unknown = known == sizes.Dimensions(sequence=known.sequence, rows=known.rows)
        setup = run.setup if run else None
        found = sizes.common(error.asked) if unknown else sizes.matches(error.asked, known, setup)
    shards = (given.arm or "").startswith(SHARD_WEIGHTS)
    ranked = causes(error, found, shards_weights=shards, states=_states(run))
    return Explanation(error, ranked, run, gpu_of(given.gpu, error.total))


def _states(run: Training | None) -> str:
    """Return what takes the most of the predicted peak."""
    if run is None:
        return ""
    whole = estimate(run.setup)
    name, most = max(whole.at_peak.items(), key=lambda part: part[1])
    return f"; of the predicted peak of {size(whole.peak_bytes)}, {size(most)} are {name.replace('_', ' ')}"
