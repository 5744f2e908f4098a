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
from study.watch import effective, sources
from study.watch.oom import reading, sizes
from study.watch.oom.causes import Cause, causes
from study.watch.oom.reading import OomError

NEAR = 0.03  # a GPU's memory in the message may differ from the datasheet's by this share
SHARD_WEIGHTS = ("zero3", "fsdp", "hsdp")  # the beginnings of the names of such arms
SHARD_STATES = (*SHARD_WEIGHTS, "zero")
STATES = ("weights", "gradients", "master", "moments")
LADDER = ("zero2", "zero3", "fsdp2", "zero2_cpu", "zero3_cpu")  # arms that hold less and less
ALONE = ("zero2_cpu", "zero3_cpu")  # of them, those that help a single GPU
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
    setup: Setup | None
    arm: str | None
    gpu: str | None
    read: tuple[str, ...]
    """Flags for what the log says of the training."""


def explain(text: str, wanted: Wanted, given: Described, **numbers: int | None) -> Explanation:
    """Return the causes of the first error in a text. `numbers` are those of a model: vocabulary, hidden, ffn, heads.

    Raise Stop if the text has no such error, or if a flag is wrong.
    """
    for name in ("ranks", "micro_batch", "sequence"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            raise Stop(f"{flag(name)} must be at least 1", "give 1 or more")
    error = reading.find(text)
    log = reading.settings(text, error)
    zero: dict[str, Any] = {}
    if given.config is not None:
        settings = effective.effective_settings(sources.read(given.config))
        values = {name: setting.value for name, setting in settings.items()}
        zero = {name: values[name] for name in BUCKETS if isinstance(values.get(name), int | float)}
        given = _filled(given, {ours: values.get(name) for name, ours in OF_SETTINGS.items()} | {"arm": _arm(values)})
    described = {name: int(log[name]) for name in ("ranks", "micro_batch", "sequence") if name in log}
    described |= {"arm": _arm_in(log), "checkpointing": "checkpointing" in log or None}
    filled = _filled(given, described)
    read = {name: value for name, value in described.items() if value and getattr(given, name) is None}
    model = None
    if wanted == Wanted() and shape_of(log.get("model", "")) in SHAPES:
        read["model"] = shape_of(log["model"])
        wanted = Wanted(model=read["model"])
    if wanted.model or wanted.params:
        model = asked_for(wanted, filled.sequence or 1)
    setup = _setup(model, filled, zero) if model and filled.arm else None
    numbers = {name: int(log[name]) for name in sizes.NAMES if name in log} | numbers
    known = _known(model, filled, setup, numbers, zero)
    arm = filled.arm or ""
    states_bytes = None if arm.endswith(("_cpu", "_nvme")) else known.states_bytes
    if setup:
        at_peak = estimate(setup).at_peak
        states_bytes = sum(at_peak.get(role, 0) for role in STATES)
    matches = []
    if (model or numbers) and error.asked and error.where == "GPU" and not error.asked.is_small:
        matches = sizes.matches(error.asked, known)
    ranked = causes(error, matches, states_bytes, arm.startswith(SHARD_WEIGHTS))
    flags = tuple(f"{flag(name)} {value}".removesuffix(" True") for name, value in read.items())
    return Explanation(error, ranked, setup, filled.arm, _gpu(filled.gpu, error.total), flags)


def _filled(given: Described, known: dict[str, Any]) -> Described:
    """Return the description with values for what it leaves open."""
    return replace(given, **{name: value for name, value in known.items() if getattr(given, name) is None})


def _arm(values: dict[str, Any]) -> str:
    """Return the arm that is nearest to a config."""
    homes = {values.get(part) for part in OFFLOADS}
    if values.get("engine") == "FSDP":
        return "fsdp2"
    if not values.get("stage"):
        return "single" if values.get("ranks") == 1 else "ddp"
    home = "_nvme" if "nvme" in homes else "_cpu" if "cpu" in homes else ""
    return f"zero{values['stage']}{home}"


def _arm_in(log: dict[str, str]) -> str | None:
    if "stage" in log:
        return f"zero{log['stage']}_cpu" if "offload" in log and log["stage"] != "1" else f"zero{log['stage']}"
    return "fsdp2" if "fsdp" in log else None


def _known(
    model: Transformer | None, given: Described, setup: Setup | None, numbers: dict[str, Any], zero: dict[str, Any]
) -> sizes.Known:
    """Return what is known of the sizes of tensors, with a model or without one."""
    arm = given.arm or ""
    passes: dict[str, Any] = {"sequence": given.sequence, "rows": given.micro_batch}
    if arm.startswith("zero"):
        passes["buckets"] = USUAL_BUCKETS | zero
    if not arm or arm.startswith(SHARD_STATES):
        passes["ranks"] = setup.ranks if setup else given.ranks or 1
    if model is None:
        return sizes.Known(**numbers, **passes)
    passes["shapes"] = {tensor.name: tensor.shape for tensor in model.tensors}
    passes["trained"] = sum(tensor.elements for tensor in model.tensors if tensor.trains)
    return sizes.Known(**sizes.numbers_of(model.dimensions) | {"vocabulary": model.look.vocabulary}, **passes)


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
        sequence=min(given.sequence or SEQUENCE, model.positions or sizes.LONGEST),
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


def proposals(setup: Setup, arm: str | None, gpu: str) -> list[Proposal]:
    """Return the training as it is, and then the changes that fit, the fastest first."""
    changes: dict[str, dict[str, Any]] = {}
    if setup.loss == "whole" and setup.model.look.kind == "decoder":
        changes["--loss chunked"] = {"loss": "chunked"}
    if not setup.checkpointing and setup.model.has_checkpointing:
        changes["--checkpointing"] = {"checkpointing": True}
    cheap = {name: value for values in changes.values() for name, value in values.items()}
    if len(changes) > 1:
        changes[" ".join(changes)] = cheap
    if setup.micro_batch > 1:
        rows, passes = setup.micro_batch // 2, setup.accumulation * 2
        changes[f"--micro-batch {rows} --accumulation {passes}"] = {"micro_batch": rows, "accumulation": passes}
    for other in LADDER if setup.ranks > 1 else ALONE:
        if other != arm:
            plain = {"deepspeed": None, "fsdp": None, "fsdp_offload": False, "group": None, "sequence_ranks": 1}
            distributed = plain | {"tensor_ranks": 1} | distribution(arms.load_arm(other), setup.ranks)
            changes[f"--arm {other}"] = distributed
            changes[f"--arm {other} with all that costs little"] = distributed | cheap
    now = _proposal("as it is", setup, gpu)
    better = []
    for change, values in changes.items():
        with contextlib.suppress(Stop):  # the arm cannot train this, or it has to be traced without torch
            better.append(_proposal(change, replace(setup, **values), gpu))
    fitting = [each for each in better if each.step_s is not None and each.peak_bytes < now.peak_bytes]
    return [now, *sorted(fitting, key=lambda each: (each.step_s or 0, each.peak_bytes))[:MOST]]


def _proposal(change: str, setup: Setup, gpu: str) -> Proposal:
    peak = estimate(setup).peak_bytes
    if peak + reserve_bytes(GPUS[gpu]) > GPUS[gpu].memory_bytes:  # as an advice has it
        return Proposal(change, peak, None)
    machine = Machine(gpu=gpu, gpus_per_node=min(setup.ranks, GPUS[gpu].per_node))
    return Proposal(change, peak, step_time(setup, machine).seconds)
