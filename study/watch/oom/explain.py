"""Explain an error about memory: read it, match its size with a training, rank the causes, predict what would fit.

The training is described by flags, by a config, and by what the log says of it, in this order.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from study.core import arms
from study.core.errors import Stop
from study.core.gpus import GPUS, gpu_named
from study.core.settings import flag
from study.core.shapes import SHAPES, shape_of
from study.predict.front import (
    BUCKETS,
    SEQUENCE,
    Machine,
    Setup,
    Transformer,
    Wanted,
    asked_for,
    distribution,
    estimate,
    reserve_bytes,
    step_time,
    usual_precision,
    with_zero,
)
from study.records.schema import Record
from study.watch import sources
from study.watch.findings import Finding
from study.watch.oom import reading
from study.watch.oom.causes import Cause, Match, causes
from study.watch.oom.reading import Asked, OomError

NEAR = 0.03  # a GPU's memory in the message may differ from the datasheet's by this share
SHARD_WEIGHTS = ("zero3", "fsdp", "hsdp")  # the beginnings of the names of such arms
STATES = ("weights", "gradients", "master", "moments")
LADDER = ("zero2", "zero3", "fsdp2", "zero2_cpu", "zero3_cpu")  # arms that hold less and less
USUAL_BUCKETS = {"reduce_bucket_size": 5e8}
MOST = 6
OF_LOGS = ("ranks", "micro_batch", "sequence", "vocabulary")
OF_SETTINGS = {"rows per pass and rank": "micro_batch", "ranks": "ranks", "checkpointing": "checkpointing"}


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
    checkpointing: bool | None = None
    """Activations are recomputed in the backward pass."""
    gpu: str | None = None
    """Kind of GPU. Default: one with as much memory as the message says."""
    vocabulary: int | None = None
    """Size of the vocabulary, for a model that is not named."""

    def __post_init__(self):
        for name in ("ranks", "micro_batch", "sequence", "vocabulary"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise Stop(f"{flag(name)} must be at least 1 (got {value})", "give 1 or more")


@dataclass(frozen=True)
class Proposal:
    """A change, its predicted peak, and the time of a step, which is None if it does not fit."""

    change: str
    peak_bytes: int
    step_s: float | None


@dataclass(frozen=True)
class Explanation:
    """An error with its causes. `setup` is None if too little is known for a prediction, as is `gpu`."""

    error: OomError
    causes: list[Cause]
    given: Described  # with what the config and the log say
    zero: dict[str, Any]  # sizes of buckets in the config
    setup: Setup | None
    gpu: str | None


def explain(text: str, wanted: Wanted, given: Described) -> Explanation:
    """Return the causes of the first error in a text. Raise Stop if it has none, or if a flag is wrong."""
    error = reading.find(text)
    # --- what trains: flags win over the config, and that over what the log says
    zero: dict[str, Any] = {}
    if given.config is not None:
        settings = sources.effective_settings(sources.read(given.config))
        values = {name: setting.value for name, setting in settings.items()}
        zero = {name: values[name] for name in BUCKETS if isinstance(values.get(name), int | float)}
        given = _filled(given, arm=_arm(values), **{ours: values.get(name) for name, ours in OF_SETTINGS.items()})
    log = reading.settings(text, error)
    in_log = {"stage": log.get("stage"), "offload_optimizer": log.get("offload"), "engine": log.get("fsdp") and "FSDP"}
    numbers = {name: int(log[name]) for name in OF_LOGS if name in log}
    given = _filled(given, arm=_arm(in_log), checkpointing="checkpointing" in log or None, **numbers)
    if wanted == Wanted() and shape_of(log.get("model", "")) in SHAPES:
        wanted = Wanted(model=shape_of(log["model"]))
    model = asked_for(wanted, given.sequence or 1) if wanted.model or wanted.params else None
    # --- what can be behind the error
    setup = None
    states_bytes = None
    if model and given.arm:
        setup = _setup(model, given, zero)
        at_peak = estimate(setup).at_peak
        states_bytes = sum(at_peak.get(role, 0) for role in STATES)
    matched = []
    if (model or given.vocabulary) and error.asked and error.where == "GPU" and not error.asked.is_small:
        matched = _matches(error.asked, model, given, zero)
    ranked = causes(error, matched, states_bytes, (given.arm or "").startswith(SHARD_WEIGHTS))
    return Explanation(
        error=error,
        causes=ranked,
        given=given,
        zero=zero,
        setup=setup,
        gpu=_gpu(given.gpu, error.total),
    )


def _filled(given: Described, **known: Any) -> Described:
    """Return the description with values for what it leaves open."""
    return replace(given, **{name: value for name, value in known.items() if getattr(given, name) is None})


def _arm(values: dict[str, Any]) -> str | None:
    """Return the arm that is nearest to the settings of a config or a log. None if they say nothing."""
    if not any(values.values()):
        return None
    if values.get("engine") == "FSDP":
        return "fsdp2"
    if values.get("stage"):
        arm = f"zero{values['stage']}"
        if {values.get("offload_optimizer"), values.get("offload_param")} - {None, "none"}:
            return f"{arm}_cpu"  # a disk holds what is offloaded as well as the host does: the GPU's part is the same
        return arm
    return "single" if values.get("ranks") == 1 else "ddp"


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


def _matches(asked: Asked, model: Transformer | None, given: Described, zero: dict[str, Any]) -> list[Match]:
    """Return what has the asked size, the surest first and one for each cause.

    A tensor has elements of 4 bytes or of 2. Where a size depends on tokens, their number is computed, and if that is a
    likely one, the size fits.
    """
    matched = list(_of_tokens(asked, model, given))
    for (cause, elements, text), element_bytes in itertools.product(_tensors(model, given, zero), (4, 2)):
        if asked.low <= elements * element_bytes <= asked.high:
            points = OF_THE_MODEL if cause == "optimizer" else EXACT
            matched.append(Match(cause, f"{text} x {element_bytes} bytes", points))
    # --- the surest of each cause; beside a number that is the model's own, one of tokens may be by chance
    best: dict[str, Match] = {}
    for match in sorted(matched, key=lambda match: -match.points):
        best.setdefault(match.cause, match)
    least = EXACT if "optimizer" in best else POSSIBLE
    return [match for match in best.values() if match.points >= least]


def _tensors(model: Transformer | None, given: Described, zero: dict[str, Any]) -> list[tuple[str, float, str]]:
    """Return tensors whose sizes do not depend on tokens: a cause, the elements, and these as a person writes them."""
    arm = given.arm or "zero"  # if nothing is known, what ZeRO has is tried as well
    tensors: list[tuple[str, float, str]] = []
    if arm.startswith("zero"):
        buckets = USUAL_BUCKETS | zero
        tensors = [("buckets", elements, f"{elements:,.0f} elements of {name}") for name, elements in buckets.items()]
    if model is None:
        return tensors
    # ZeRO makes a rank's part of each state as one flat vector, in fp32 even for 16-bit weights.
    trained = sum(tensor.elements for tensor in model.tensors if tensor.trains)
    if arm.startswith(("zero", *SHARD_WEIGHTS)):
        ranks = given.ranks or 1
        tensors.append(("optimizer", trained / ranks, f"{trained:,} parameters / {ranks} ranks"))
    tensors.append(("optimizer", trained, f"{trained:,} parameters"))
    for tensor in model.tensors:
        if len(tensor.shape) > 1:
            sides = " x ".join(f"{side:,}" for side in tensor.shape)
            tensors.append(("weights", tensor.elements, f"{sides} of {tensor.name}"))
    return tensors


def _of_tokens(asked: Asked, model: Transformer | None, given: Described) -> Iterator[Match]:
    """Yield logits, activations, and scores and masks of attention."""
    # --- a vector for each token: a row of logits, or what lies between the two layers of an MLP
    rows = given.micro_batch or 1
    heads = 1
    widths = {"logits": given.vocabulary, "activations": None}
    if model is not None:
        heads = model.dimensions.get("num_attention_heads", 1)
        widths = {"logits": model.look.vocabulary, "activations": model.dimensions.get("intermediate_size")}
    for (cause, width), element_bytes in itertools.product(widths.items(), (4, 2)):
        if width:
            token_bytes = width * element_bytes
            tokens = given.sequence and given.sequence * rows
            count, points = _count(asked.low / token_bytes, asked.high / token_bytes, tokens)
            if cause == "activations":  # weights have this width, too
                points -= 1
            yield Match(cause, f"{count:,} tokens x {width:,} x {element_bytes} bytes", points)
    # --- a number for each pair of tokens: the scores of attention, or a mask
    for of_heads, element_bytes in itertools.product({heads, 1}, (4, 2, 1)):  # a mask has no heads, and may be of bools
        unit = of_heads * rows * element_bytes
        length, points = _count(math.sqrt(asked.low / unit), math.sqrt(asked.high / unit), given.sequence)
        if points >= IS_ROUND:
            factors = f"{rows} rows x {of_heads} heads x {length:,} x {length:,} tokens x {element_bytes} bytes"
            yield Match("attention", factors, points)


def _count(low: float, high: float, known: int | None) -> tuple[int, int]:
    """Return a number of tokens between two, and how likely it is: known, round, or any. 0 points: there is none."""
    if known and low <= known <= high:
        return known, KNOWN
    least = max(math.ceil(low), FEWEST)
    if high < least or low > LONGEST:
        return 0, 0
    # The multiple of the largest power of two that lies between them.
    power = 1
    while high // (2 * power) * 2 * power >= least:
        power *= 2
    roundest = int(high // power * power)
    return roundest, POSSIBLE if roundest % ROUND else IS_ROUND


# --- which change would fit


def _setup(model: Transformer, given: Described, zero: dict[str, Any]) -> Setup:
    """Return the training to predict. What is not given is as usual: 8 ranks, one row of 2,048 tokens, 16 bits."""
    arm = arms.load_arm(given.arm)
    if zero and arm.deepspeed:
        arm = with_zero(arm, zero)
    ranks = given.ranks or 8
    if arm.distributed_type == "NO":
        ranks = 1
    return Setup(
        model=model,
        attention="sdpa" if model.has_fused_attention else "eager",
        frozen="bf16",
        device="cuda",
        ranks=ranks,
        sequence=min(given.sequence or SEQUENCE, model.positions or LONGEST),
        micro_batch=given.micro_batch or 1,
        precision=usual_precision(arm),
        checkpointing=given.checkpointing or False,
        **distribution(arm, ranks),
    )


def _gpu(given: str | None, total_bytes: int | None) -> str | None:
    """Return the GPU that the user names, or the first with as much memory as the message says."""
    if given is not None:
        return gpu_named(given)
    for name, gpu in GPUS.items():
        # A message has what the driver leaves of the datasheet's memory.
        if total_bytes and abs(gpu.memory_bytes / total_bytes - 1) <= NEAR:
            return name
    return None


def proposals(seen: Explanation) -> list[Proposal]:
    """Return the training as it is, and then the changes that fit, the fastest first. Empty if too little is known."""
    if seen.setup is None or seen.gpu is None:
        return []
    # --- the training as it is, with smaller passes, and under arms that hold less
    changes: list[dict[str, Any]] = [
        {},
        {"micro_batch": max(1, seen.setup.micro_batch // 2)},
        {"checkpointing": True},
    ]
    for arm in LADDER:
        changes += [{"arm": arm}, {"arm": arm, "checkpointing": True}]
    # --- what each of them would need, and how long its step would take
    gpu = GPUS[seen.gpu]
    tried = []
    for values in changes:
        described = replace(seen.given, ranks=seen.setup.ranks, **values)
        with contextlib.suppress(Stop):  # the arm cannot train this, or it has to be traced without torch
            setup = _setup(seen.setup.model, described, seen.zero)
            peak = estimate(setup).peak_bytes
            step_s = None
            if peak + reserve_bytes(gpu) <= gpu.memory_bytes:  # as an advice has it
                step_s = step_time(setup, Machine(gpu=seen.gpu, gpus_per_node=min(setup.ranks, gpu.per_node))).seconds
            change = " ".join(f"{flag(name)} {value}" for name, value in values.items()).replace(" True", "")
            tried.append(Proposal(change, peak, step_s))
    now, *others = tried
    fitting = [each for each in others if each.step_s is not None and each.peak_bytes < now.peak_bytes]
    return [now, *sorted(fitting, key=lambda each: each.step_s or 0)[:MOST]]


def memory_full(record: Record, file: Path) -> list[Finding]:
    """What the error of a run says that ended for lack of memory, and the command that finds what would fit."""
    if record.status != "oom" or record.error is None:
        return []
    seen = record.observed
    flags = {"arm": seen.arm, "ranks": seen.ranks, "micro-batch": record.watched.rows_per_pass}
    words = " ".join(f"--{name} {value}" for name, value in flags.items() if value)
    remedy = f"`study oom {file} --model MODEL {words}` names the tensor, and predicts which arms fit"
    sentence = "The memory was full"
    # A message without sizes has no causes.
    with contextlib.suppress(Stop, IndexError):
        cause = explain(record.error.message, Wanted(), Described(ranks=seen.ranks)).causes[0]
        sentence += f"; the likeliest cause: {cause.what}"
        remedy = f"{cause.remedy}; {remedy}"
    return [Finding(sentence, remedy, id="memory_full")]
