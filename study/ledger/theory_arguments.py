"""The arguments that checks by formulas share: a model, a GPU's memory, a training."""

import inspect
from collections.abc import Callable, Mapping

from study.errors import Stop
from study.machine.gpus import GPUS
from study.predictor.architecture import Architecture, generic, named
from study.predictor.architecture import parameters as count_parameters
from study.predictor.setup import Setup
from study.spec.validation import nearest

Name, Number, Whole = str | None, float | None, int | None


def also_takes(helper: Callable) -> Callable:
    """Add a helper's parameters to the signature of a check that passes its `**given` on to the helper.

    Claims files are validated against signatures. If both have a parameter of the same name, the check's one stays.
    """

    def with_parameters(check: Callable) -> Callable:
        parameters = {**inspect.signature(helper).parameters, **inspect.signature(check).parameters}.values()
        check.__signature__ = inspect.Signature([each for each in parameters if each.kind is each.KEYWORD_ONLY])
        return check

    return with_parameters


def one_of(known: Mapping, name: str, what: str):
    if name not in known:
        raise Stop(f"{name!r} is not a known {what}", nearest(name, known))
    return known[name]


def exactly_one(**given) -> None:
    if sum(value is not None for value in given.values()) != 1:
        raise Stop(f"exactly one of {' and '.join(given)} is needed", "give one of them")


def size_of(*, model: Name = None, parameters: Number = None) -> float:
    exactly_one(model=model, parameters=parameters)
    return count_parameters(named(model)) if model else parameters


def device_bytes(*, gpu: Name = None, memory_bytes: Number = None) -> float:
    exactly_one(gpu=gpu, memory_bytes=memory_bytes)
    return one_of(GPUS, gpu, "GPU").memory_bytes if gpu else memory_bytes


def model_of(
    *, model: Name = None, parameters: Number = None, layers: Whole = None, hidden: Whole = None
) -> Architecture:
    if model is None and None in (parameters, layers, hidden):
        raise Stop("no model is given", "give model, or parameters, layers and hidden")
    return named(model) if model else generic(parameters, layers, hidden)


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
    """The training that a claim describes."""
    how = {"precision": precision, "attention": attention, "checkpointing": checkpointing, "device": "cuda"}
    rows = {"micro_batch": micro_batch, "accumulation": accumulation, "sequence": sequence}
    return Setup.of_arm(model_of(**given), arm, ranks=ranks, **how, **rows)
