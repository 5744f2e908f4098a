"""The arguments that checks by formulas share: a model, a GPU's memory, a training."""

from collections.abc import Mapping
from typing import TypeAlias, TypeVar

from study.errors import Stop
from study.io.validation import nearest
from study.ledger.arguments import also_takes
from study.machine.gpus import GPUS
from study.predictor.architecture import generic, named
from study.predictor.setup import Setup
from study.predictor.tracing.transformer import Transformer

Name: TypeAlias = str | None
Number: TypeAlias = float | None
Whole: TypeAlias = int | None
Thing = TypeVar("Thing")


def one_of(known: Mapping[str, Thing], name: str | None, what: str) -> Thing:
    if name is None or name not in known:
        raise Stop(f"{name!r} is not a known {what}", nearest(str(name), known))
    return known[name]


def size_of(*, model: Name = None, parameters: Number = None) -> float:
    """Return a number of parameters, or that of a built-in shape."""
    if model and parameters is None:
        return named(model).parameters
    if parameters is None or model:
        raise Stop("exactly one of model and parameters is needed", "give one of them")
    return parameters


def device_bytes(*, gpu: Name = None, memory_bytes: Number = None) -> float:
    """Return the memory of a GPU, by its name or as a number."""
    if gpu and memory_bytes is None:
        return one_of(GPUS, gpu, "GPU").memory_bytes
    if memory_bytes is None or gpu:
        raise Stop("exactly one of gpu and memory_bytes is needed", "give one of them")
    return memory_bytes


def model_of(
    *, model: Name = None, parameters: Number = None, layers: Whole = None, hidden: Whole = None
) -> Transformer:
    """Return a built-in shape, or a model of so many parameters."""
    if model:
        return named(model)
    if parameters is None or layers is None or hidden is None:
        raise Stop("no model is given", "give model, or parameters, layers and hidden")
    return generic(parameters, layers, hidden)


@also_takes(model_of)
def setup_of(
    *,
    arm: str = "single",
    ranks: int = 1,
    precision: str = "bf16_cast",
    micro_batch: int = 1,
    accumulation: int = 1,
    sequence: int = 1024,
    attention: str = "sdpa",
    checkpointing: bool = False,
    **given,
) -> Setup:
    """Return the training that a claim describes."""
    how = {"precision": precision, "attention": attention, "checkpointing": checkpointing, "device": "cuda"}
    rows = {"micro_batch": micro_batch, "accumulation": accumulation, "sequence": sequence}
    return Setup.of_arm(model_of(**given), arm, ranks=ranks, **how, **rows)
