"""How options are read from the command line: tyro, with help and errors for people who do not know Python's types."""

import typing
from collections.abc import Callable
from types import NoneType

import docstring_parser
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

OPTIONS = ConstructorRegistry()
NUMBERS = {int: ("INT", "a whole number"), float: ("FLOAT", "a number")}


def with_plain_help(options: type) -> type:
    """A class whose attributes have docstrings of several lines, with these where tyro joins their lines.

    tyro 1.0 looks for lines that go on before it takes their indentation away, and breaks each where it was broken.
    """
    said = docstring_parser.parse_from_object(options).params
    lines = [f"    {each.arg_name}: {' '.join((each.description or '').split())}" for each in said]
    options.__doc__ = "\n".join([(options.__doc__ or "").partition("\n\nArgs:")[0], "", "Args:", *lines])
    return options


@OPTIONS.primitive_rule
def optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """`--gpu STR`, where tyro says `--gpu {None}|STR`. Who wants None leaves the option out."""
    members = typing.get_args(info.type)
    if NoneType not in members:
        return None
    rest = typing.Union[tuple(member for member in members if member is not NoneType)]  # noqa: UP007 (not an annotation)
    given = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(rest, info.markers))
    if not isinstance(given, PrimitiveConstructorSpec):
        return None
    return PrimitiveConstructorSpec(
        nargs=given.nargs,
        metavar=given.metavar,
        instance_from_str=given.instance_from_str,
        is_instance=lambda value: value is None or given.is_instance(value),
        str_from_instance=lambda value: ["none"] if value is None else given.str_from_instance(value),
        choices=given.choices,
    )


@OPTIONS.primitive_rule
def number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """A number; the message for anything else says what was expected."""
    if info.type not in NUMBERS:
        return None
    metavar, _ = NUMBERS[info.type]
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=_reader(info.type),
        is_instance=lambda value: isinstance(value, int | info.type) and not isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )


def _reader(kind: type) -> Callable[[list[str]], float]:
    def read(words: list[str]) -> float:
        try:
            return kind(words[0])
        except ValueError:
            raise ValueError(f"expected {NUMBERS[kind][1]} (got {words[0]!r})") from None

    return read
