"""Explain an error about memory: read it, match its size with a training, and rank the causes.

The training is described by flags and by a config. Flags win.
"""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from study.core import arms
from study.core.errors import Stop
from study.core.settings import flag
from study.core.text import is_number
from study.predict.front import (
    BUCKETS,
    Transformer,
    Wanted,
    asked_for,
)
from study.watch import sources
from study.watch.differences import recognised
from study.watch.oom import reading
from study.watch.oom.causes import Cause, Match, causes
from study.watch.oom.reading import Asked, OomError

SHARD_WEIGHTS = ("zero3", "fsdp", "hsdp")  # the beginnings of the names of such arms
USUAL_BUCKETS = {"reduce_bucket_size": 5e8}
NUMBERS = ("ranks", "micro_batch", "sequence", "vocabulary")


@dataclass(frozen=True, kw_only=True)
class Described:
    """The training, as far as it is known."""

    arm: str | None = None
    """Name of the nearest arm; `study arms` lists them."""
    config: Path | None = None
    """The training's own Accelerate config, DeepSpeed config or Trainer arguments. Flags win over it."""
    ranks: int | None = None
    """Processes that train together, one per GPU."""
    micro_batch: int | None = None
    """Rows per GPU and pass."""
    sequence: int | None = None
    """Tokens per row."""
    vocabulary: int | None = None
    """Size of the vocabulary, for a model that is not named."""

    def __post_init__(self):
        for name in NUMBERS:
            if (value := getattr(self, name)) is not None and value < 1:
                raise Stop(f"{flag(name)} must be at least 1 (got {value})", "give 1 or more")

    def filled(self, known: dict[str, Any]) -> "Described":
        """Return the description with values for what it leaves open."""
        return replace(self, **{name: known.get(name) for name, value in vars(self).items() if value is None})


@dataclass(frozen=True)
class KnownTraining:
    """What is known of the training by its flags and its config. Without an arm, what ZeRO has is tried."""

    given: Described
    model: Transformer | None
    buckets: dict[str, Any]  # their sizes in the config

    @property
    def arm(self) -> str:
        return self.given.arm or "zero"


@dataclass(frozen=True)
class Explanation:
    """An error with its causes, and the training as it was understood."""

    error: OomError
    causes: list[Cause]
    training: KnownTraining


def explain(text: str, wanted: Wanted, given: Described) -> Explanation:
    """Return the causes of the first error in a text. Raise Stop if it has none, or if a flag is wrong."""
    if given.arm:
        arms.load_arm(given.arm)  # a misspelt name is refused
    error = reading.find(text)
    config = _of_config(given.config)
    given = given.filled(config)
    model = None
    if wanted.model or wanted.params:
        model = asked_for(wanted, given.sequence or 1)
    buckets = {name: config[name] for name in BUCKETS if is_number(config.get(name))}
    training = KnownTraining(given, model, buckets)
    shards_weights = training.arm.startswith(SHARD_WEIGHTS)
    return Explanation(error, causes(error, _matches(error, training), shards_weights), training)


def _of_config(path: Path | None) -> dict[str, Any]:
    """Return the settings of a config by our names, and its arm."""
    if path is None:
        return {}
    settings = sources.effective_settings(recognised(path))
    values = {name: each.value for name, each in settings.items() if each.value not in (sources.AUTO, sources.UNKNOWN)}
    values["micro_batch"] = values.get("rows per pass and rank")
    for name in NUMBERS:
        text = str(values.get(name))  # JSON and YAML may have a number in quotes
        values[name] = int(text) if re.fullmatch("[1-9][0-9]{0,8}", text) else None
    arm = "single" if values["ranks"] == 1 else "ddp"
    return values | {"arm": _sharded_arm(values) or arm}


def _sharded_arm(values: dict[str, Any]) -> str | None:
    """Return the arm that is nearest to the settings of a config. None if they name neither ZeRO nor FSDP."""
    if values.get("engine") == "FSDP":
        return "fsdp2"
    if str(values.get("stage")) not in ("1", "2", "3"):
        return None
    if any(values.get(part) not in (None, "none") for part in arms.OFFLOADS):
        return f"zero{values['stage']}_cpu"  # a disk holds it as well as the host does: the GPU's part is the same
    return f"zero{values['stage']}"


# --- which tensors of the training have the size that was asked for

# Points of a size. States come first: their sizes follow from the model alone. Almost any size is some number of
# tokens, so a match of tokens counts only if their number is known, or a multiple of 256.
OF_THE_MODEL = 5
KNOWN = 4  # as many tokens as a pass is said to have
EXACT = 3
IS_ROUND = 2
POSSIBLE = 1
ROUND = 256  # tokens: lengths and their products with rows are mostly multiples of it
LONGEST = 2**21  # tokens of a pass
FEWEST = 64


def _matches(error: OomError, training: KnownTraining) -> list[Match]:
    """Return what has the asked size, one for each cause. A tensor has elements of 4 bytes or of 2."""
    asked = error.asked
    is_known = training.model or training.given.vocabulary
    if asked.is_small or not is_known:
        return []
    matched = list(_of_tokens(asked, training))
    for (cause, elements, text), element_bytes in itertools.product(_tensors(training), (4, 2)):
        if asked.low <= elements * element_bytes <= asked.high:
            points = OF_THE_MODEL if cause == "optimizer" else EXACT
            matched.append(Match(cause, f"{text} x {element_bytes} bytes", points))
    # --- the surest of each cause; beside a number that is the model's own, one of tokens may be by chance
    best = {match.cause: match for match in sorted(matched[::-1], key=lambda match: match.points)}
    least = EXACT if "optimizer" in best else POSSIBLE
    return [match for match in best.values() if match.points >= least]


def _tensors(training: KnownTraining) -> Iterator[tuple[str, float, str]]:
    """Yield tensors whose sizes do not depend on tokens: a cause, the elements, and these as a person writes them."""
    if training.arm.startswith("zero"):
        # 5e8 elements are DeepSpeed's default (zero/config.py:113): 2.0 GB in fp32 and 1.0 GB in 16 bits, with any
        # model.
        for name, elements in (USUAL_BUCKETS | training.buckets).items():
            yield "buckets", elements, f"{elements:,.0f} elements of {name}"
    if training.model is None:
        return
    # ZeRO makes a rank's part of each state as one flat vector, in fp32 even for 16-bit weights.
    tensors = training.model.tensors
    trained = sum(tensor.elements for tensor in tensors if tensor.trains)
    if training.arm.startswith(("zero", *SHARD_WEIGHTS)):
        # It is cloned from the flat weights of a rank's part (zero/stage_1_and_2.py:560), while deepspeed.initialize
        # runs.
        ranks = training.given.ranks or 1
        yield "optimizer", trained / ranks, f"{trained:,} parameters / {ranks} ranks"
    yield "optimizer", trained, f"{trained:,} parameters"
    for tensor in tensors:
        if len(tensor.shape) > 1:
            sides = " x ".join(f"{side:,}" for side in tensor.shape)
            yield "weights", tensor.elements, f"{sides} of {tensor.name}"


def _of_tokens(asked: Asked, training: KnownTraining) -> Iterator[Match]:
    """Yield logits, activations, and scores and masks of attention."""
    # --- a vector for each token: a row of logits, or what lies between the two layers of an MLP
    given = training.given
    rows = given.micro_batch or 1
    sequence = given.sequence or 1
    dimensions = {}
    vocabulary = given.vocabulary
    if training.model is not None:
        dimensions = training.model.dimensions
        vocabulary = training.model.look.vocabulary
    # Weights have the width of the activations, too.
    widths = (("logits", vocabulary, 0), ("activations", dimensions.get("intermediate_size"), 1))
    for (cause, width, less), element_bytes in itertools.product(widths, (4, 2)):
        if width:
            count, points = _count(asked, width * element_bytes, 1, sequence * rows)
            yield Match(cause, f"{count:,} tokens x {width:,} x {element_bytes} bytes", points - less)
    # --- a number for each pair of tokens: the scores of attention, or a mask, without heads and maybe of bools
    for heads, element_bytes in itertools.product({dimensions.get("num_attention_heads", 1), 1}, (4, 2, 1)):
        length, points = _count(asked, heads * rows * element_bytes, 2, sequence)
        if points >= IS_ROUND:
            factors = f"{rows} rows x {heads} heads x {length:,} x {length:,} tokens x {element_bytes} bytes"
            yield Match("attention", factors, points)


def _count(asked: Asked, unit_bytes: int, power: int, known: int) -> tuple[int, int]:
    """Return the tokens that give the asked size with a unit, and the points for how likely they are: 0 if none do.

    They are a multiple of those that are known. `known` is 1 if none are.
    """
    low, high = ((bound / unit_bytes) ** (1 / power) / known for bound in (asked.low, asked.high))
    if known > 1 and low <= 1 <= high:
        return known, KNOWN
    least = math.ceil(max(low, FEWEST / known))
    if high < least or low * known > LONGEST:
        return 0, 0
    # The multiple of the largest power of two that lies between them: without the digits in which they differ.
    digits = ((least - 1) ^ int(high)).bit_length() - 1
    roundest = (int(high) >> digits << digits) * known
    return roundest, POSSIBLE if roundest % ROUND else IS_ROUND
