"""Reads options from the command line with tyro. Help and errors avoid the names of Python types."""

import functools
import inspect
import operator
import re
import typing
from collections.abc import Callable
from dataclasses import is_dataclass
from types import NoneType

import docstring_parser
import tyro
from tyro import _errors as parsing
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from study.core.errors import Stop, nearest
from study.core.settings import Tokens

OPTIONS = ConstructorRegistry()
AsJson = typing.Annotated[bool, tyro.conf.arg(name="json")]
NUMBERS = {
    "invalid literal for int() with base 10": "expected a whole number",
    "could not convert string to float": "expected a number",
}


def parsed(command: Callable, **options):
    """Call a command, or build a dataclass, with the options of the command line. A mistake in them is a Stop."""

    def refuse(event: parsing.ParseErrorEvent) -> None:
        """Mistakes of any other kind are left to tyro's own message."""
        more = f"{event.prog} --help explains the options"
        match event:
            case parsing.MissingArgs(unrecognized_tokens=[], missing_arguments=missing):
                raise _missing(event.prog, missing[0].arg)
            case parsing.MissingArgs(unrecognized_tokens=[word, *_]) | parsing.UnrecognizedArgs(tokens=[word, *_]):
                raise _not_known(event.prog, word.partition("=")[0], command)
            case parsing.BadValue(argument=argument, reason="too_few_values"):
                raise Stop(f"{_flag(argument)} is given without a value", more)
            case parsing.InvalidChoice(argument=argument, value=value, choices=choices):
                raise Stop(f"{_flag(argument) or event.prog} cannot be {value!r}", nearest(value, choices))
            case parsing.InstantiationFailure(argument=argument, message=message) if argument is not None:
                problem, _, value = message.partition(": ")
                what = f"{NUMBERS[problem]} (got {value})" if problem in NUMBERS else message
                raise Stop(f"{_flag(argument) or event.prog}: {what}", more)

    with_plain_help(command)
    for hint in map(_without_annotation, typing.get_type_hints(command).values()):
        if isinstance(hint, type) and is_dataclass(hint):
            with_plain_help(hint)
    with parsing.on_parse_error(refuse):
        return tyro.cli(command, registry=OPTIONS, **options)


def _without_annotation(hint: object) -> object:
    return getattr(hint, "__origin__", hint)


def _missing(prog: str, argument) -> Stop:
    if argument.lowered.choices:
        words = f"one of {', '.join(argument.lowered.choices)}"
    else:
        words = " ".join(str(argument.field.helptext or f"{prog} --help explains it").split()).removesuffix(".")
    return Stop(f"{prog} needs {_flag(argument) or 'one more word'}", f"give {words[0].lower()}{words[1:]}")


def _not_known(prog: str, word: str, command: Callable) -> Stop:
    """Return the error for an option that the help does not list."""
    if not word.startswith("--"):
        return Stop(f"{prog} takes no {word!r}", f"leave it out, or see {prog} --help")
    usage = tyro.extras.get_parser(command, registry=OPTIONS).format_help()
    options = re.findall(r"(?<![\w-])--[a-z][a-z-]*", usage)
    meant = "--arm" if word == "--stage" else word
    return Stop(
        f"{prog} has no option {word}", nearest(meant, options, otherwise=f"{prog} --help explains the options")
    )


def _flag(argument) -> str:
    """Return the flag of an option; empty for a positional argument."""
    return "" if argument.is_positional() else argument.lowered.name_or_flags[-1]


def with_plain_help(command: Callable) -> Callable:
    """Join the lines of each paragraph in a command's docstring, and of each text about an option.

    tyro 1.0 keeps the line breaks of the source before an indented line and before a bracket.
    """
    texts = docstring_parser.parse_from_object(command).params
    lines = [f"    {each.arg_name}: {' '.join((each.description or '').split())}" for each in texts]
    head = inspect.cleandoc(command.__doc__ or "").partition("\n\nArgs:")[0]
    paragraphs = [" ".join(paragraph.split()) for paragraph in head.split("\n\n")]
    command.__doc__ = "\n".join(["\n\n".join(paragraphs), "", "Args:", *lines])
    return command


@OPTIONS.primitive_rule
def optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """`--gpu STR`, where tyro would show `--gpu {None}|STR`. To get None, leave the option out."""
    members = typing.get_args(info.type)
    if NoneType not in members:
        return None
    rest = functools.reduce(operator.or_, [member for member in members if member is not NoneType])
    if rest == Tokens:
        return _number_of_tokens(info)
    given = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(rest, info.markers))
    if not isinstance(given, PrimitiveConstructorSpec):
        return None
    return PrimitiveConstructorSpec(
        nargs=given.nargs,
        metavar=given.metavar,
        instance_from_str=given.instance_from_str,
        is_instance=lambda value: value is None or given.is_instance(value),
        str_from_instance=lambda value: ["unset"] if value is None else given.str_from_instance(value),
        choices=given.choices,
    )


def _number_of_tokens(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec:
    """Return how to read a number of tokens such as 8192 or 8k."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: _tokens(words[0]),
        is_instance=lambda value: value is None or isinstance(value, int),
        str_from_instance=lambda value: ["unset" if value is None else str(value)],
    )


def _tokens(word: str) -> int:
    number = word.lower().removesuffix("k")
    return int(number) * (1 if number == word else 1024)
