"""The arguments of checks, validated against their signatures; and those that checks by formulas share."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from study.errors import Stop
from study.io.validation import nearest, sentence
from study.machine.gpus import GPUS
from study.predictor.architecture import generic, named
from study.predictor.setup import Setup
from study.predictor.tracing.transformer import Transformer

STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
Check = Callable[..., Any]  # the function of a check: keyword arguments in, a Finding out
Name: TypeAlias = str | None
Number: TypeAlias = float | None
Whole: TypeAlias = int | None
Thing = TypeVar("Thing")


def as_list(value) -> list:
    return value if isinstance(value, list) else [value]


def also_takes(helper: Callable) -> Callable[[Check], Check]:
    """Add a helper's parameters to the signature of a check that passes its `**given` on to the helper.

    Claims files are validated against signatures. If both have a parameter of the same name, the check's one stays.
    """

    def with_parameters(check: Check) -> Check:
        parameters = {**inspect.signature(helper).parameters, **inspect.signature(check).parameters}
        keywords = [each for each in parameters.values() if each.kind is each.KEYWORD_ONLY]
        vars(check)["__signature__"] = inspect.Signature(keywords)
        return check

    return with_parameters


@functools.cache
def argument_model(function: Check) -> type[BaseModel]:
    """Return the keyword arguments of a check as a pydantic model."""
    fields: dict[str, Any] = {}
    for each in inspect.signature(function).parameters.values():
        if each.kind is each.KEYWORD_ONLY:
            default = ... if each.default is each.empty else each.default
            fields[each.name] = (each.annotation, default)
    return create_model(function.__name__, __config__=STRICT, **fields)


def calls_of(function: Check, given: dict, name: str) -> list[dict]:
    """Return the calls of a check: one, or one for each element of the lists given to arguments that take one value."""
    model = argument_model(function)
    try:
        model.model_validate(given)
        return [given]  # unconverted: 13 stays a whole number where a float is expected
    except ValidationError as error:
        wrong = {each["loc"][0] for each in error.errors()}
        message = f"does not fit {name}: {sentence(error, model.model_fields, name=lambda parts: parts[0])}"
    lists = {name: value for name, value in given.items() if name in wrong and isinstance(value, list) and value}
    if set(lists) != wrong:
        raise ValueError(message)
    if len({len(values) for values in lists.values()}) > 1:
        raise ValueError(f"has lists of different lengths: {', '.join(lists)}")
    elements = zip(*lists.values(), strict=True)
    calls = [given | dict(zip(lists, values, strict=True)) for values in elements]
    try:
        for call in calls:
            model.model_validate(call)
    except ValidationError:
        raise ValueError(message) from None
    return calls


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
