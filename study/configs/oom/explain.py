"""Explain an error about memory: match its size with the tensors of a training, and rank the causes.

The training is described by flags and by a config. Flags win.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from study.configs.mistakes import recognised
from study.configs.oom.causes import Cause, causes, clues
from study.configs.oom.reading import SMALL, OomError
from study.configs.settings import AUTO, UNKNOWN, effective_settings
from study.core import arms
from study.core.errors import Stop
from study.core.settings import flag
from study.core.text import is_number, size
from study.predict.front import BUCKETS, Transformer, Wanted, asked_for, papers

SHARD_WEIGHTS = ("zero3", "fsdp", "hsdp")  # the beginnings of the names of such arms
# By arm: the stage by which the papers' formulas divide its states. Of groups of ranks and of offloading they say less.
STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp2": 3}
MOST_POWER = 11  # of two: 1,024 ranks
FILLING = 0.7  # of a GPU: activations, buckets and the CUDA context want the rest
USUAL_BUCKETS = {"reduce_bucket_size": 5e8}
NUMBERS = ("ranks", "micro_batch", "sequence", "vocabulary")
Tensor = tuple[str, float, str]  # the cause that it means, its elements, and these as a person writes them


@dataclass(frozen=True, kw_only=True)
class Described:
    """The training, as far as it is known."""

    arm: str | None = None
    """Name of the nearest arm; `study arms` lists them."""
    config: Path | None = None
    """The training's own Accelerate config, DeepSpeed config or Trainer arguments. Flags win over it."""
    ranks: Annotated[int | None, tyro.conf.arg(aliases=("--gpus",))] = None
    """Processes that train together, one per GPU."""
    micro_batch: int | None = None
    """Sequences of a micro-batch, on each GPU."""
    sequence: int | None = None
    """Tokens per sequence."""
    checkpointing: bool | None = None
    """Activations are recomputed in the backward pass."""
    vocabulary: int | None = None
    """Size of the vocabulary, if the model is not named or has another."""

    def __post_init__(self):
        for name in NUMBERS:
            if (value := getattr(self, name)) is not None and value < 1:
                raise Stop(f"{flag(name)} must be at least 1 (got {value})", "give 1 or more")
        if self.arm and arms.load_arm(self.arm).name != self.arm:  # a misspelt name is refused
            raise Stop(f"--arm {self.arm} is a file", f"give it as --config {self.arm}")


def explain(error: OomError, wanted: Wanted, given: Described) -> tuple[list[Cause], Described]:
    """Return the causes of an error, and the training with what its config says. Raise Stop if a flag is wrong."""
    config = _of_config(given.config)
    given = replace(given, **{name: config.get(name) for name, value in vars(given).items() if value is None})
    model = asked_for(wanted, given.sequence or 1) if wanted != Wanted() else None  # a part of a model is refused
    has_adapters = bool(wanted.lora_rank or config.get("adapters"))
    trained = 0
    if model and (wanted.lora_rank or not config.get("adapters")):  # else nothing is said of states that are not known
        trained = sum(tensor.elements for tensor in model.tensors if tensor.trains)
    sizes: dict[str, str] = {}
    if error.asked.high > SMALL:
        buckets = USUAL_BUCKETS | {name: config[name] for name in BUCKETS if is_number(config.get(name))}
        tensors = [*_of_tokens(given, model, error), *_of_buckets(given, buckets)]
        if model:
            tensors += _of_model(given, model, trained, has_adapters)
        sizes = _fitting(error, tensors, wanted)
        other = ranks_that_share(error, given, trained)
        if other and "oom-optimizer" not in sizes:
            alone = f"1 rank, and not by {given.ranks}" if other == 1 else f"{other} ranks, and not by {given.ranks}"
            sizes["oom-optimizer"] = f"{error.asked.text} = {trained:,} parameters x 4 bytes, shared by {alone}: "
    shards_weights = (given.arm or "").startswith(SHARD_WEIGHTS)
    states = "" if has_adapters else _filling(error, given, trained)
    return causes(error, sizes, shards_weights, states, has_adapters), given


def ranks_that_share(error: OomError, given: Described, trained: int) -> int | None:
    """Return by how many ranks an fp32 state of the asked size is shared, if that is another number than was given.

    None: by that number, or by no power of two. A state of 16 bits that is shared by half as many is as large.
    """
    if not (given.arm or "").startswith(("zero", *SHARD_WEIGHTS)) or not given.ranks or error.asked.high <= SMALL:
        return None
    numbers = [2**power for power in range(MOST_POWER)]
    sharing = [each for each in numbers if error.asked.low <= 4 * trained / each <= error.asked.high]
    if not sharing or sharing[0] in (given.ranks, 2 * given.ranks):
        return None
    # A whole weight of 32 or 16 bits is as large as what one or two ranks share.
    if sharing[0] <= 2 and "oom-optimizer" not in {id for id, _, _ in clues(error)}:
        return None
    return sharing[0]


def _fitting(error: OomError, tensors: list[Tensor], wanted: Wanted) -> dict[str, str]:
    """Return by cause the first of its tensors that has the asked size, as a sentence begins."""
    sizes: dict[str, str] = {}
    for cause, elements, words in tensors:
        for element_bytes in _widths(cause, wanted):
            if error.asked.low <= elements * element_bytes <= error.asked.high:
                sizes.setdefault(cause, f"{error.asked.text} = {words} x {element_bytes} bytes: ")
    if len(sizes) > 1:  # the guess is for what nothing else explains
        sizes.pop("oom-padded", None)
    return sizes


def _widths(cause: str, wanted: Wanted) -> tuple[float, ...]:
    """Return the bytes that an element may have."""
    if cause == "oom-attention":  # a mask may be of bools
        return (4, 2, 1)
    # Frozen weights may be of 8 or 4 bits.
    if wanted.lora_rank and cause in ("oom-frozen", "oom-weights", "oom-gather"):
        return (4, 2, 1, 0.5)
    return (4, 2)


def _filling(error: OomError, given: Described, trained: int) -> str:
    """Return what the model states of a rank take, if that is most of the GPU; empty if not, or if it is not known."""
    if error.total and given.ranks and given.arm in STAGES:
        held = sum(papers.states_bytes(trained, STAGES[given.arm], given.ranks).values())
        # Where less is allocated, they are not there yet, or are others than predicted.
        if FILLING * error.total < held <= (error.allocated or held):
            return f"{given.arm} on {given.ranks} ranks holds {size(held)}"
    return ""


def _of_config(path: Path | None) -> dict[str, Any]:
    """Return the settings of a config by our names, and the arm that is nearest to them."""
    if path is None:
        return {}
    settings = effective_settings(recognised(path))
    values = {name: each.value for name, each in settings.items() if each.value not in (AUTO, UNKNOWN)}
    values["micro_batch"] = values.get("sequences per micro-batch and rank")
    for name in NUMBERS:
        text = str(values.get(name))  # JSON and YAML may have a number in quotes
        values[name] = int(text) if re.fullmatch("[1-9][0-9]{0,8}", text) else None
    values["checkpointing"] = True if str(values.get("checkpointing")).lower() == "true" else None
    values["arm"] = "single" if values["ranks"] == 1 else "ddp"
    if values.get("engine") == "FSDP":
        values["arm"] = "fsdp2"
    elif str(values.get("stage")) in ("1", "2", "3"):
        values["arm"] = f"zero{values['stage']}"
        # A disk holds it as well as the host does: the GPU's part is the same.
        if any(values.get(part) not in (None, "none") for part in arms.OFFLOADS):
            values["arm"] += "_cpu"
    return values


def _of_tokens(given: Described, model: Transformer | None, error: OomError) -> Iterator[Tensor]:
    vocabulary, intermediate, heads = given.vocabulary, None, 1
    if model:
        vocabulary = vocabulary or model.look.vocabulary
        intermediate = model.dimensions.get("intermediate_size")
        heads = model.dimensions.get("num_attention_heads", 1)
    rows, sequence = given.micro_batch or 0, given.sequence or 0
    if tokens := rows * sequence:
        for cause, width in (("oom-logits", vocabulary), ("oom-activations", intermediate)):
            if width:
                yield cause, tokens * width, f"{tokens:,} tokens x {width:,}"
        for number in (heads, 1):  # a mask has no heads
            factors = f"{rows} sequences x {number} heads x {sequence:,} x {sequence:,} tokens"
            yield "oom-attention", tokens * number * sequence, factors
    if vocabulary:
        yield from _of_padded(vocabulary, rows, sequence, error)


def _of_padded(vocabulary: int, rows: int, sequence: int, error: OomError) -> Iterator[Tensor]:
    for element_bytes in (4, 2):
        tokens = (error.asked.low + error.asked.high) / 2 / vocabulary / element_bytes
        if rows * sequence:
            # A batch is padded to its longest row. With 4 and 2 bytes, any size from a quarter of the full logits up is
            # some such length. Little else in a pass is as large: a vocabulary is several times as wide as an MLP.
            longest = round(tokens / rows)
            if sequence / 2 < longest < sequence:
                factors = f"{rows} sequences x about {longest:,} of {sequence:,} tokens x {vocabulary:,}"
                yield "oom-padded", rows * longest * vocabulary, factors
        else:
            # Almost any size is some number of tokens, but few are thousands: with the two digits of a message and a
            # vocabulary of 128,256 one in 25.
            thousands = 1024 * round(tokens / 1024)
            yield "oom-padded", thousands * vocabulary, f"{thousands:,} tokens x {vocabulary:,}"


def _of_buckets(given: Described, buckets: dict[str, Any]) -> Iterator[Tensor]:
    # Without an arm, what ZeRO has is tried. Of the config, with any model: 5e8 elements are DeepSpeed's default
    # (zero/config.py:113), 2.0 GB in fp32.
    if (given.arm or "zero").startswith("zero"):
        for name, elements in buckets.items():
            yield "oom-buckets", elements, f"{elements:,.0f} elements of {name}"


def _of_model(given: Described, model: Transformer, trained: int, has_adapters: bool) -> Iterator[Tensor]:
    """Yield the tensors of which the model and its division alone say the size."""
    arm = given.arm or "zero"
    whole = "oom-optimizer"
    if arm.startswith(("zero", *SHARD_WEIGHTS)):
        # ZeRO makes a rank's part of each state as one flat vector, in fp32 even for 16-bit weights. It is cloned from
        # the flat weights of that part (zero/stage_1_and_2.py:560), while deepspeed.initialize runs.
        ranks = given.ranks or 1
        yield "oom-optimizer", trained / ranks, f"{trained:,} parameters / {ranks} ranks"
        if given.arm:  # its ranks hold no state of the optimizer whole
            whole = "oom-weights"
    if not (has_adapters and whole == "oom-weights"):  # adapters are no whole weight
        yield whole, trained, f"{trained:,} parameters"
    frozen = sum(tensor.elements for tensor in model.tensors) - trained
    yield "oom-frozen", frozen, f"{frozen:,} frozen parameters"
    # The embedding and the head are reduced together: they are larger than a bucket, or of FSDP's outermost unit.
    of_words = [tensor for tensor in model.tensors if model.look.vocabulary in tensor.shape and len(tensor.shape) == 2]
    # Frozen ones have no gradient, and only who divides them gathers them.
    if len(of_words) == 2 and (not has_adapters or arm.startswith(SHARD_WEIGHTS)):
        sides = " x ".join(f"{side:,}" for side in of_words[0].shape)
        cause = "oom-gather" if has_adapters else "oom-embeddings"
        yield cause, sum(tensor.elements for tensor in of_words), f"2 x {sides}"
    for tensor in model.tensors:
        if len(tensor.shape) > 1:
            sides = " x ".join(f"{side:,}" for side in tensor.shape)
            yield "oom-weights", tensor.elements, f"{sides} of {tensor.name}"
