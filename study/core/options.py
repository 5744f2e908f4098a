"""Reads options from the command line with tyro, whose help gets whole paragraphs and no names of Python types."""

import functools
import inspect
import operator
import typing
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from types import NoneType

import docstring_parser
import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

OPTIONS = ConstructorRegistry()
AsJson = typing.Annotated[bool, tyro.conf.arg(name="json")]


def parsed(command: Callable, **options):
    """Call a command, or build a dataclass, with the options of the command line.

    For a mistake in them tyro prints what is wrong and what was probably meant, and ends the program with exit code 2.
    """
    for described in (command, *typing.get_type_hints(command).values()):
        if described is command or is_dataclass(described):
            _join_lines(described)
    return tyro.cli(command, registry=OPTIONS, **options)


def _join_lines(command) -> None:
    """Join the lines of each paragraph in a docstring, and of each text about an option.

    tyro 1.0 keeps the line breaks of the source before an indented line and before a bracket. It takes the texts of a
    dataclass's fields from below the fields, unless the docstring has them.
    """
    # docstring_parser is what tyro uses, so it finds the same texts.
    texts = docstring_parser.parse_from_object(command).params
    options = [f"    {each.arg_name}: {' '.join((each.description or '').split())}" for each in texts]
    head = inspect.cleandoc(command.__doc__ or "").partition("\n\nArgs:")[0]
    paragraphs = [" ".join(paragraph.split()) for paragraph in head.split("\n\n")]
    command.__doc__ = "\n".join(["\n\n".join(paragraphs), "", "Args:", *options])


@OPTIONS.primitive_rule
def optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """`--gpu STR`, where tyro would show `--gpu {None}|STR`. To get None, leave the option out."""
    # A union of two literals is one with None, and may stay one.
    members = typing.get_args(info.type)
    if NoneType not in members:
        return None
    kind = functools.reduce(operator.or_, (member for member in members if member is not NoneType))
    given = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, info.markers))
    if not isinstance(given, PrimitiveConstructorSpec):
        return None  # a tuple of any length, which tyro reads as a struct
    return replace(
        given,
        is_instance=lambda value: value is None or given.is_instance(value),
        str_from_instance=lambda value: ["unset"] if value is None else given.str_from_instance(value),
    )
