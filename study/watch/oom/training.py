"""The training in which an error happened, as far as the user describes it: by flags, and by a config."""

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
    Precision,
    Setup,
    Transformer,
    Wanted,
    asked_for,
    distribution,
    usual_precision,
    with_zero,
)
from study.watch import effective, sources
from study.watch.oom.sizes import LONGEST, Dimensions

NEAR = 0.03  # a GPU's memory in the message may differ from the datasheet's by this share
OF_SETTINGS = {  # our names, by those of `study diff`
    "rows per pass and rank": "micro_batch",
    "accumulation": "accumulation",
    "ranks": "ranks",
    "sequence": "sequence",
    "checkpointing": "checkpointing",
}
OF_LOG = ("ranks", "micro_batch", "accumulation", "sequence")  # numbers of a training that logs have
OF_SHAPE = ("vocabulary", "hidden", "ffn", "heads")  # and those of a model


@dataclass(frozen=True, kw_only=True)
class Shaped(Wanted):
    """The model, or the sizes of it that are known."""

    vocabulary: int | None = None
    """Size of the vocabulary."""
    ffn: int | None = None
    """Width of the feed-forward layers."""
    heads: int | None = None
    """Attention heads."""


@dataclass(frozen=True, kw_only=True)
class Described:
    """The training, as far as it is known."""

    arm: str | None = None
    """Name of the nearest arm; `study arms` lists them."""
    config: Path | None = None
    """The training's own Accelerate config, DeepSpeed config or Trainer arguments. Flags win over it."""
    ranks: int | None = None
    """Processes that train together, one per GPU."""
    precision: Precision | None = None
    """As in the trainer. Default: 16 bits, in the usual way of the arm."""
    micro_batch: int | None = None
    """Rows per GPU and pass."""
    accumulation: int | None = None
    """Passes per step."""
    sequence: int | None = None
    """Tokens per row."""
    checkpointing: bool | None = None
    """Activations are recomputed in the backward pass."""
    gpu: str | None = None
    """Kind of GPU. Default: one with as much memory as the message says."""


@dataclass(frozen=True)
class Training:
    """A description with all that a prediction needs. `assumed` says what the user left out."""

    setup: Setup
    arm: str
    assumed: tuple[str, ...]


def with_config(given: Described) -> tuple[Described, dict[str, Any]]:
    """Return the description with what its config says, and the sizes of its buckets; these are empty without one."""
    if given.config is None:
        return given, {}
    settings = effective.effective_settings(sources.read(given.config))
    values = {name: setting.value for name, setting in settings.items()}
    known = {ours: values[theirs] for theirs, ours in OF_SETTINGS.items() if type(values.get(theirs)) in (int, bool)}
    stage = values.get("stage") if values.get("engine") == "DeepSpeed" else None
    offloads = {name: values.get(name) for name in OFFLOADS if values.get(name) not in (None, "none")}
    known["arm"] = _arm_of(values, stage, offloads)
    numbers = {name: values[name] for name in BUCKETS if isinstance(values.get(name), int | float)}
    return _filled(given, known), numbers if stage else {}


def with_log(wanted: Shaped, given: Described, log: dict[str, str]) -> tuple[Shaped, Described, tuple[str, ...]]:
    """Return the model and the training with what their log says, and that as flags. Other flags win over it."""
    model = _model_in(log) if wanted == Shaped() else {}
    described = _numbers_in(log, OF_LOG) | {"arm": _arm_in(log), "checkpointing": "checkpointing" in log}
    new = {name: value for name, value in described.items() if value and getattr(given, name) is None}
    read = tuple(f"{flag(name)} {value}".removesuffix(" True") for name, value in (model | new).items())
    return replace(wanted, **model), _filled(given, new), read


def _numbers_in(log: dict[str, str], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: int(log[name]) for name in names if name in log}


def _model_in(log: dict[str, str]) -> dict[str, Any]:
    """Return the built-in shape that a log names, or the numbers of the config that it prints."""
    shape = shape_of(log.get("model", ""))
    return {"model": shape} if shape in SHAPES else _numbers_in(log, OF_SHAPE)


def _arm_in(log: dict[str, str]) -> str | None:
    """Return the arm that is nearest to what a log says."""
    if "stage" not in log:
        return "fsdp2" if "fsdp" in log else None
    is_offloaded = "offload" in log and log["stage"] != "1"
    return f"zero{log['stage']}_cpu" if is_offloaded else f"zero{log['stage']}"


def _filled(given: Described, known: dict[str, Any]) -> Described:
    """Return the description with values for what it leaves open."""
    return replace(given, **{name: value for name, value in known.items() if getattr(given, name) is None})


def _arm_of(values: dict, stage: int | None, offloads: dict) -> str:
    """Return the arm that is nearest to a config."""
    if str(values.get("engine", "")).startswith("FSDP"):
        return "fsdp2"
    if not stage:
        return "single" if values.get("ranks") == 1 else "ddp"
    home = "_cpu" if offloads else ""
    if "nvme" in offloads.values() and stage == 3:
        home = "_nvme"
    return f"zero{stage}{home}"


def dimensions(wanted: Shaped, model: Transformer | None, given: Described) -> Dimensions:
    """Return what is known of the sizes of tensors, with a model or without one."""
    known: dict[str, Any] = {"sequence": given.sequence, "rows": given.micro_batch}
    if model is not None:
        weights = {tensor.name: tensor.shape for tensor in model.tensors}
        return Dimensions.of_config(model.dimensions, **known, weights=weights, vocabulary=model.look.vocabulary)
    numbers = {name: getattr(wanted, name) for name in OF_SHAPE}
    return Dimensions(**{**numbers, **known})


def model_of(wanted: Shaped, given: Described) -> Transformer | None:
    """Return the model, if the user names one or gives all its numbers."""
    if wanted.model is None and wanted.params is None:
        return None
    return asked_for(wanted, given.sequence or 1)


def training(model: Transformer | None, given: Described, zero: dict[str, Any]) -> Training | None:
    """Return the training to predict. None if the model or the way it is distributed is unknown."""
    if model is None or given.arm is None:
        return None
    arm = arms.load_arm(given.arm)
    if zero and arm.deepspeed:
        arm = with_zero(arm, zero)
    alone = arm.distributed_type == "NO"
    longest = model.positions or LONGEST
    defaults: dict[str, Any] = {
        "ranks": 1 if alone else 8,
        "sequence": min(SEQUENCE, longest),
        "micro_batch": 1,
        "precision": usual_precision(arm),
    }
    names = (*defaults, "accumulation", "checkpointing")
    known = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    values = defaults | known
    values |= {"ranks": 1 if alone else values["ranks"], "sequence": min(values["sequence"], longest)}
    values |= distribution(arm, values["ranks"])
    attention = "sdpa" if model.has_fused_attention else "eager"
    setup = Setup(model=model, attention=attention, frozen="bf16", device="cuda", **values)
    assumed = tuple(f"{flag(name)} {default}" for name, default in defaults.items() if name not in known)
    return Training(setup, given.arm, assumed)


def gpu_of(given: str | None, total_bytes: int | None) -> str | None:
    """Return the GPU that the user names, or the first with as much memory as the message says."""
    if given is not None:
        return gpu_named(given)
    near = [name for name in GPUS if total_bytes and abs(GPUS[name].memory_bytes / total_bytes - 1) <= NEAR]
    return near[0] if near else None


def checked(given: Described) -> Described:
    """Return the description. Raise Stop for numbers that no training has."""
    for name in ("ranks", "micro_batch", "accumulation", "sequence"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise Stop(f"{name} must be at least 1 (got {value})", "give 1 or more")
    return given
