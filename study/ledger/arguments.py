"""The arguments that a claims file gives to a check, validated against the signature of the check's function."""

import functools
import inspect
from collections.abc import Callable

from pydantic import BaseModel, ValidationError, create_model

from study.errors import Stop
from study.spec.validation import sentence

STRICT = {"extra": "forbid", "strict": True, "frozen": True, "allow_inf_nan": False}


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def as_list(value) -> list:
    return value if isinstance(value, list) else [value]


@functools.cache
def argument_model(function: Callable) -> type[BaseModel]:
    """The keyword arguments of a check as a pydantic model."""
    arguments = [each for each in inspect.signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY]
    fields = {each.name: (each.annotation, ... if each.default is each.empty else each.default) for each in arguments}
    return create_model(function.__name__, __config__=STRICT, **fields)


def one_argument(along: dict[str, list]) -> tuple[str, list]:
    """The argument along which there is a trend, and its values."""
    if len(along) != 1 or len(next(iter(along.values()))) < 2:
        what = f"a trend is along two or more values of one argument (got {along})"
        raise Stop(what, "give along = { name = [...] }")
    return next(iter(along.items()))


def calls_of(function: Callable, given: dict, name: str) -> list[dict]:
    """The calls of a check: one, or one for each element of the lists given to arguments that take one value."""
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
    calls = [given | dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    try:
        for call in calls:
            model.model_validate(call)
    except ValidationError:
        raise ValueError(message) from None
    return calls
