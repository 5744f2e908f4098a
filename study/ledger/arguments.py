"""The arguments that a claims file gives to a check, validated against the signature of the check's function."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeGuard

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from study.errors import Stop
from study.io.validation import sentence

STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
Check = Callable[..., Any]  # the function of a check: keyword arguments in, a Finding out


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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


def one_argument(along: dict[str, list]) -> tuple[str, list]:
    """Return the argument along which there is a trend, and its values."""
    if len(along) == 1:
        ((name, values),) = along.items()
        if len(values) > 1:
            return name, values
    what = f"a trend is along two or more values of one argument (got {along})"
    raise Stop(what, "give along = { name = [...] }")


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
