"""Explain an error about memory: read it, match its size with a training, rank the causes, predict what would fit.

The training is described by flags, by a config, and by what the log says of it, in this order.
"""

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from study.core import arms
from study.core.arms import OFFLOADS
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
from study.watch import sources
from study.watch.oom import reading
from study.watch.oom.causes import LONGEST, Cause, Known, causes, matches
from study.watch.oom.reading import OomError

NEAR = 0.03  # a GPU's memory in the message may differ from the datasheet's by this share
SHARD_WEIGHTS = ("zero3", "fsdp", "hsdp")  # the beginnings of the names of such arms
STATES = ("weights", "gradients", "master", "moments")
LADDER = ("zero2", "zero3", "fsdp2", "zero2_cpu", "zero3_cpu")  # arms that hold less and less
USUAL_BUCKETS = {"reduce_bucket_size": 5e8}
MOST = 6
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
    log = reading.settings(text, error)
    zero: dict[str, Any] = {}
    if given.config is not None:
        settings = sources.effective_settings(sources.read(given.config))
        values = {name: setting.value for name, setting in settings.items()}
        zero = {name: values[name] for name in BUCKETS if isinstance(values.get(name), int | float)}
        given = _filled(given, {ours: values.get(name) for name, ours in OF_SETTINGS.items()} | {"arm": _arm(values)})
    described = {name: int(log[name]) for name in ("ranks", "micro_batch", "sequence", "vocabulary") if name in log}
    in_log = {"engine": "FSDP" if "fsdp" in log else None, "stage": log.get("stage")}
    in_log |= {"offload_optimizer": "cpu"} if "offload" in log else {}
    arm = {"arm": _arm(in_log)} if any(in_log.values()) else {}
    given = _filled(given, described | arm | {"checkpointing": "checkpointing" in log or None})
    if wanted == Wanted() and shape_of(log.get("model", "")) in SHAPES:
        wanted = Wanted(model=shape_of(log["model"]))
    model = asked_for(wanted, given.sequence or 1) if wanted.model or wanted.params else None
    setup = _setup(model, given, zero) if model and given.arm else None
    states_bytes = None
    if setup:
        at_peak = estimate(setup).at_peak
        states_bytes = sum(at_peak.get(role, 0) for role in STATES)
    found = []
    if (model or given.vocabulary) and error.asked and error.where == "GPU" and not error.asked.is_small:
        found = matches(error.asked, _known(model, given, zero))
    ranked = causes(error, found, states_bytes, (given.arm or "").startswith(SHARD_WEIGHTS))
    return Explanation(error, ranked, given, zero, setup, _gpu(given.gpu, error.total))


def _filled(given: Described, known: dict[str, Any]) -> Described:
    """Return the description with values for what it leaves open."""
    return replace(given, **{name: value for name, value in known.items() if getattr(given, name) is None})


def _arm(values: dict[str, Any]) -> str:
    """Return the arm that is nearest to the settings of a config."""
    homes = {values.get(part) for part in OFFLOADS} - {None, "none"}
    if values.get("engine") == "FSDP":
        return "fsdp2"
    if not values.get("stage"):
        return "single" if values.get("ranks") == 1 else "ddp"
    return f"zero{values['stage']}{'_cpu' if homes else ''}"


def _known(model: Transformer | None, given: Described, zero: dict[str, Any]) -> Known:
    """Return what is known of the sizes of tensors, with a model or without one."""
    known = Known(vocabulary=given.vocabulary, sequence=given.sequence, rows=given.micro_batch or 1)
    arm = given.arm or "zero"
    if arm.startswith("zero"):
        known = replace(known, buckets=USUAL_BUCKETS | zero)
    if arm.startswith(("zero", *SHARD_WEIGHTS)):
        known = replace(known, ranks=given.ranks or 1)
    if model is None:
        return known
    return replace(
        known,
        vocabulary=model.look.vocabulary,
        ffn=model.dimensions.get("intermediate_size"),
        heads=model.dimensions.get("num_attention_heads", 1),
        shapes={tensor.name: tensor.shape for tensor in model.tensors},
        trained=sum(tensor.elements for tensor in model.tensors if tensor.trains),
    )


def _setup(model: Transformer, given: Described, zero: dict[str, Any]) -> Setup:
    """Return the training to predict. What is not given is as usual: 8 ranks, one row of 2,048 tokens, 16 bits."""
    arm = arms.load_arm(given.arm)
    if zero and arm.deepspeed:
        arm = with_zero(arm, zero)
    ranks = 1 if arm.distributed_type == "NO" else given.ranks or 8
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
    near = [name for name in GPUS if total_bytes and abs(GPUS[name].memory_bytes / total_bytes - 1) <= NEAR]
    return near[0] if near else None


def proposals(seen: Explanation) -> list[Proposal]:
    """Return the training as it is, and then the changes that fit, the fastest first. Empty if too little is known."""
    if seen.setup is None or seen.gpu is None:
        return []
    changes: list[dict[str, Any]] = [{}, {"micro_batch": max(1, seen.setup.micro_batch // 2)}, {"checkpointing": True}]
    for arm in LADDER:
        changes += [{"arm": arm}, {"arm": arm, "checkpointing": True}]
    gpu = GPUS[seen.gpu]
    tried = []
    for values in changes:
        described = replace(seen.given, ranks=seen.setup.ranks, **values)
        with contextlib.suppress(Stop):  # the arm cannot train this, or it has to be traced without torch
            setup = _setup(seen.setup.model, described, seen.zero)
            peak = estimate(setup).peak_bytes
            fits = peak + reserve_bytes(gpu) <= gpu.memory_bytes  # as an advice has it
            machine = Machine(gpu=seen.gpu, gpus_per_node=min(setup.ranks, gpu.per_node))
            change = " ".join(f"{flag(name)} {value}" for name, value in values.items()).replace(" True", "")
            tried.append(Proposal(change, peak, step_time(setup, machine).seconds if fits else None))
    now, *others = tried
    fitting = [each for each in others if each.step_s is not None and each.peak_bytes < now.peak_bytes]
    return [now, *sorted(fitting, key=lambda each: each.step_s or 0)[:MOST]]
