"""What a rank had on its GPU beside what is predicted, and what would take about as much."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import shorten
from typing import Literal, Self

from study.configs.oom.causes import UNUSED_SHARE, WIDTHS, in_a_pass
from study.configs.oom.explain import ranks_that_share
from study.configs.oom.reading import OomError
from study.configs.oom.said import CACHE, IN_FP32, IN_ONE_PIECE, NOT_RECOMPUTED
from study.configs.oom.training import KnownTraining
from study.core.errors import Stop
from study.core.text import binary_size
from study.predict.front import Transformer, default_sequence

LEAST_TAKEN = 2**30  # bytes: less is within what a prediction leaves for context and fragmentation
NEAR = 0.15  # of an excess: what takes about as much may be it
MOST_NEAR = 3
SAME = 0.01  # of an excess: what is exactly as much


@dataclass(frozen=True)
class Excess:
    """What took most of the memory that is predicted to be free. Nowhere: less than what was asked for."""

    where: Literal["tensors", "unused", "outside", "nowhere"]
    taken_bytes: int

    @classmethod
    def of(cls, error: OomError, needs_bytes: float) -> Self:
        """Return what it was. `needs_bytes`: the most that is predicted of tensors, with what was asked for."""
        not_predicted = round(error.needed - needs_bytes)
        taken_bytes = max(error.unallocated, error.outside)
        is_usual = taken_bytes < UNUSED_SHARE * (error.total or 0)
        if not_predicted >= LEAST_TAKEN and (is_usual or not_predicted >= taken_bytes):
            return cls("tensors", not_predicted)
        if taken_bytes < LEAST_TAKEN:
            return cls("nowhere", 0)
        return cls("unused" if taken_bytes == error.unallocated else "outside", taken_bytes)

    def differs(self, error: OomError) -> str:
        """Return that a training is not as it was given: a rank had more in tensors than that makes."""
        return (
            f"{error.had}; what was given makes at most {binary_size(error.needed - self.taken_bytes)} then, "
            "predicted. Micro-batch, sequence, recomputing or arm differ, or this process holds something else."
        )


def helps_in_one_piece(error: OomError, training: KnownTraining) -> bool:
    """Whether what PyTorch holds without use would be enough for the tensor in one piece, which it is not yet."""
    return error.unallocated >= error.asked.high > 0 and IN_ONE_PIECE not in training.settings


def although_it_fits(error: OomError, training: KnownTraining, model: Transformer, rest: Excess) -> str:
    """Return how a sentence goes on that says whether a training fits: with what takes most of the rest."""
    if other := ranks_that_share(error, training):
        return f", but the size is that of states shared by {other}: did the launcher start {training.ranks}?"
    taken = binary_size(rest.taken_bytes)
    line, _ = _made_besides(training)
    besides = f"`{shorten(line, 80)}`, which is not predicted, or " if line else ""
    match rest.where:
        case "nowhere":
            return f": {besides}something that was not given takes the rest, or differs."
        case "unused":
            first = f" Try {IN_ONE_PIECE} first." if helps_in_one_piece(error, training) else ""
            return f", but {taken} are reserved by PyTorch and not used.{first}"
        case "outside":
            others = f"{error.told_others}, and the rest is of" if error.others else "other processes,"
            return f", but {taken} are outside PyTorch: {others} NCCL, a CUDA context."
    copy = as_a_second_model(training, rest.taken_bytes)
    near = ", or ".join(_near(error, training, model, rest.taken_bytes))
    by = copy or f"{besides}something that was not given takes them, or differs"
    by += f"; about as much is taken by {near}" if near else ""
    return f", but this process had {taken} more in tensors: {by}."


def as_a_second_model(training: KnownTraining, excess_bytes: int) -> str:
    """Return that a rank had as much more as a second, whole model takes, and what makes one. Empty: it had not."""
    parameters = training.model.parameters if training.model else 0
    for width in WIDTHS:
        if abs(parameters * width / excess_bytes - 1) <= SAME:
            line, what = _made_besides(training)
            maker = f"`{shorten(line, 80)}`" if line else "a reference, a pipeline or an average of weights"
            return f"it may be {what} ({parameters:,} parameters x {width} bytes), such as {maker}"
    return ""


def _made_besides(training: KnownTraining) -> tuple[str, str]:
    """Return the line that makes another model than is trained, or a whole one where a rank trains a part; and what."""
    lines = training.settings.get("other_models", ())
    name, *_ = training.settings.get("trained_model", "").partition("=")
    others = [line for line in lines if line.partition("=")[0] != name]  # the other branch of an `if` has its name
    if others or not (lines and training.shards_weights):
        return next(iter(others), ""), "a second, whole model"
    return lines[0], "the whole model beside this rank's part of it"


def _near(error: OomError, training: KnownTraining, model: Transformer, excess_bytes: int) -> list[str]:
    """Return what would take about as many bytes as a rank had beside what is predicted, and no text rules out."""
    ruled_out = {*training.settings.get("ruled_out", ()), *([NOT_RECOMPUTED] if training.inferred else ())}
    is_in_pass = in_a_pass(error)
    if not is_in_pass:
        ruled_out |= {NOT_RECOMPUTED, CACHE}
    takers = [each for each in _takers(training, model) if each[0] not in ruled_out]
    logits = training.rows * training.sequence * training.vocabulary
    if is_in_pass and not any(
        error.asked.fits(width * logits) for width in WIDTHS
    ):  # else the size says how long sequences were
        takers += _longer(training, model)
    near = {size: words for words, size in takers if abs(size / excess_bytes - 1) <= NEAR}
    return [near[size] for size in sorted(near, key=lambda size: abs(size - excess_bytes))[:MOST_NEAR]]


def _takers(training: KnownTraining, model: Transformer) -> Iterator[tuple[str, int]]:
    """Yield what often differs from what was given, with the bytes that it takes."""
    given, sequence = training.described, training.sequence or default_sequence(model)
    now = training.memory()
    if given.checkpointing:
        yield NOT_RECOMPUTED, training.memory(checkpointing=False).peak_bytes - now.peak_bytes
    has_half = given.precision in (None, "bf16_cast", "bf16_pure")
    if training.arm.startswith("zero") and has_half:  # else they are predicted in fp32
        yield IN_FP32, now.at_peak.get("weights", 0)  # 4 bytes, and not 2
    if model.look.kind in ("encoder", "vision"):
        return
    dimensions = model.dimensions
    heads = dimensions.get("num_attention_heads") or 1
    width = dimensions.get("hidden_size", 0) / heads * dimensions.get("num_key_value_heads", heads)
    cached = 4 * training.rows * sequence * width * dimensions.get("num_hidden_layers", 0)  # two tensors of 2 bytes
    yield CACHE, round(cached)


def _longer(training: KnownTraining, model: Transformer) -> Iterator[tuple[str, int]]:
    """Yield longer sequences, with the bytes that they take more."""
    sequence = training.sequence or default_sequence(model)
    now_bytes = training.memory().peak_bytes
    for longer in (2 * sequence, 4 * sequence):
        with contextlib.suppress(Stop):  # the model reads no more
            yield f"a sequence of {longer:,} tokens", training.memory(sequence=longer).peak_bytes - now_bytes
